"""The start of a run: what RLinf's own script does, which its wheel lacks, and a Ray of the run's own.

``python -m plugrl_bridges.rlinf`` calls `main`. Everything that trains is RLinf's; see ``registration`` for how it
comes to know our environment, and ``ending`` for how the clients hear that a run is over.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import hydra

if TYPE_CHECKING:
    from types import FrameType

    from omegaconf import DictConfig

__all__ = ["CONFIGS", "DEFAULT_CONFIG", "main", "train"]

logger = logging.getLogger(__name__)

CONFIGS = "pkg://plugrl_bridges.rlinf.config"
"""Where Hydra finds the configs of this package."""
DEFAULT_CONFIG = "plugrl_pendulum_ppo_mlp"
"""What is run without ``--config-name``."""
_MODULE = "plugrl_bridges.rlinf"
_EXTENSION = "RLINF_EXT_MODULE"
_RAY_ADDRESS = "RAY_ADDRESS"
_RAY_FOLDER = "RAY_TMPDIR"
_INTERRUPTED = 130


def main() -> None:
    """Run the command: Hydra's arguments, RLinf's config, and the environment variables that both need."""
    signal.signal(signal.SIGTERM, _interrupted)
    if os.environ.setdefault(_EXTENSION, _MODULE) != _MODULE:
        logger.warning(
            "%s is %s, not %s: its register() must call %s.register()", _EXTENSION, os.environ[_EXTENSION], _MODULE,
            _MODULE,
        )  # fmt: skip
    own = _own_ray()
    try:
        hydra.main(version_base="1.3", config_path=CONFIGS, config_name=DEFAULT_CONFIG)(train)()
    except KeyboardInterrupt:
        logger.warning("interrupted: the clients were told that the run is over")
        raise SystemExit(_INTERRUPTED) from None
    finally:
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)


def train(config: DictConfig) -> None:
    """Train as RLinf's config says; a `ValueError` names the option of an env that does not fit."""
    # RLinf first imports what registers its models and losses; `register` then patches what is imported.
    from rlinf.config import validate_cfg  # noqa: PLC0415 - after the environment variables are set
    from rlinf.runners.embodied_runner import EmbodiedRunner  # noqa: PLC0415
    from rlinf.scheduler import Cluster  # noqa: PLC0415
    from rlinf.utils.placement import HybridComponentPlacement  # noqa: PLC0415
    from rlinf.workers.actor.fsdp_actor_worker import EmbodiedFSDPActor  # noqa: PLC0415
    from rlinf.workers.env.env_worker import EnvWorker  # noqa: PLC0415
    from rlinf.workers.rollout.hf.huggingface_worker import MultiStepRolloutWorker  # noqa: PLC0415

    from plugrl_bridges.rlinf.ending import close_in_workers  # noqa: PLC0415
    from plugrl_bridges.rlinf.options import check_config  # noqa: PLC0415
    from plugrl_bridges.rlinf.registration import register  # noqa: PLC0415

    if multiprocessing.get_start_method(allow_none=True) is None:
        multiprocessing.set_start_method("spawn")
    if config.runner.get("only_eval") or config.runner.task_type != "embodied":
        raise ValueError("this launcher trains: runner.task_type must be embodied and runner.only_eval false")
    register()
    evaluates = config.runner.get("val_check_interval", -1) > 0
    check_config(config, instances=1, evaluates=evaluates)  # all but the ports, before Ray is started
    config = validate_cfg(config)
    cluster = Cluster(cluster_cfg=config.cluster)
    placement = HybridComponentPlacement(config, cluster)
    instances = placement.get_world_size("env") * config.rollout.pipeline_stage_num
    check_config(config, instances=instances, evaluates=evaluates)
    groups = {
        name: worker.create_group(config).launch(
            cluster, name=config[name].group_name, placement_strategy=placement.get_strategy(name)
        )
        for name, worker in (("actor", EmbodiedFSDPActor), ("rollout", MultiStepRolloutWorker), ("env", EnvWorker))
    }
    runner = EmbodiedRunner(cfg=config, **groups)
    try:  # clients are seated while the workers start, long before `run`, which sees to its own end
        runner.init_workers()
    except BaseException:
        close_in_workers(groups["env"])
        raise
    runner.run()


def _own_ray() -> Path | None:
    """Have RLinf start a Ray of this run's own, unless the user names one; return its folder.

    RLinf joins whatever Ray it finds on the machine. Then two runs would share one, and the end of the first would be
    that of the second. The folder's name is short: Ray makes sockets in there, whose paths have 107 characters at most.
    """
    if os.environ.get(_RAY_ADDRESS) or os.environ.get(_RAY_FOLDER):
        return None
    folder = Path(tempfile.mkdtemp(prefix="plugrl-ray-"))
    os.environ[_RAY_FOLDER] = str(folder)
    return folder


def _interrupted(_number: int, _frame: FrameType | None) -> NoReturn:
    """End on SIGTERM as on Ctrl-C: by way of what must be tidied up."""
    raise KeyboardInterrupt
