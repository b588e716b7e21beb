"""The examples run as they stand, but for a free port and fewer steps."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_training_with_stable_baselines3(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    source = (EXAMPLES / "sb3_ppo.py").read_text(encoding="utf-8")
    assert "100_000" in source
    assert "port=8000" in source
    script = tmp_path / "sb3_ppo.py"
    script.write_text(source.replace("100_000", "4_096").replace("8000", str(port)), encoding="utf-8")
    command = [sys.executable, "-m", "plugrl_bridges.client", "--env-id", "Pendulum-v1", "--num-envs", "16"]
    client = subprocess.Popen([*command, "--url", f"ws://127.0.0.1:{port}"], stdout=subprocess.PIPE, text=True)
    trainer = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert trainer.returncode == 0, trainer.stderr
    assert "ep_rew_mean" in trainer.stdout
    said, _ = client.communicate(timeout=30)
    assert client.returncode == 0
    assert "env steps" in said


@pytest.mark.parametrize("via", ["in-process", "remote", "both"])
def test_comparing_weights(via: str) -> None:
    command = [sys.executable, str(EXAMPLES / "identical_weights.py"), "--env", "cartpole", "--steps", "2048"]
    done = subprocess.run(
        [*command, "--clients", "2", "--seed", "3", "--via", via], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("sha256") == (2 if via == "both" else 1)
    assert ("weights: identical" in done.stdout) == (via == "both")
