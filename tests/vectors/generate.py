"""Make the golden vectors of this directory: ``python -m tests.vectors.generate`` from the project's root.

The output depends on nothing but this file and the encoder, so a run that changes a committed file shows a change of
the wire. Good vectors are made by the project's own encoder, malformed ones by hand.
"""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from plugrl_bridges.digest.digest import EnvDigest
from plugrl_bridges.wire.codec import MAX_DEPTH, encode
from plugrl_bridges.wire.messages import (
    Action,
    Feedback,
    Infer,
    Message,
    Metadata,
    Observation,
    ResetRequest,
    to_bytes,
)
from tests.vectors.digest_cases import CASES, events_of, words_of_event

HERE = Path(__file__).parent

Entry = dict[str, Any]


def plain(value: Any) -> Any:
    """Give decoded content as JSON can hold it; README.md explains the ``$`` keys."""
    if isinstance(value, np.ndarray):
        if value.size > 1000:
            assert (value == value.reshape(-1)[0]).all()
            fill = value.reshape(-1)[0].item()
            return {"$array": {"dtype": value.dtype.str, "shape": list(value.shape), "fill": fill}}
        return {"$array": {"dtype": value.dtype.str, "shape": list(value.shape), "values": value.reshape(-1).tolist()}}
    if isinstance(value, np.generic):
        return {"$scalar": {"dtype": value.dtype.str, "value": value.item()}}
    if isinstance(value, bytes):
        return {"$bin": value.hex()}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


class Vectors:
    """Collect files and what the manifest says of them."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.good: list[Entry] = []
        self.malformed: list[Entry] = []
        self.sequences: list[Entry] = []
        self.digests: list[Entry] = []

    def message(self, name: str, what: str, message: Message) -> None:
        """Add a message as our encoder makes it."""
        file = f"messages/{name}.bin"
        self.files[file] = b"".join(to_bytes(message))
        self.good.append(
            {"file": file, "what": what, "type": message.message_type, "canonical": True}
            | {"content": plain(message.to_wire())}
        )

    def foreign(self, name: str, what: str, wire: Entry) -> None:
        """Add a message in a form that other clients send, as our encoder makes it of the map."""
        file = f"messages/{name}.bin"
        self.files[file] = b"".join(encode(wire))
        self.good.append(
            {"file": file, "what": what, "type": wire["message_type"], "canonical": True, "content": plain(wire)}
        )

    def value(self, name: str, what: str, value: Any) -> None:
        """Add one value as our encoder makes it."""
        file = f"{name}.bin"
        self.files[file] = b"".join(encode(value))
        self.good.append({"file": file, "what": what, "type": "value", "canonical": True, "content": plain(value)})

    def accepted(self, name: str, what: str, data: bytes, value: Any) -> None:
        """Add bytes that must be read, but that our encoder writes otherwise."""
        file = f"{name}.bin"
        self.files[file] = data
        self.good.append({"file": file, "what": what, "type": "value", "canonical": False, "content": plain(value)})

    def bad(self, name: str, what: str, data: bytes, *, clause: str = "3", error: str = "DecodeError") -> None:
        """Add bytes that every end refuses."""
        file = f"malformed/{name}.bin"
        self.files[file] = data
        self.malformed.append({"file": file, "what": what, "clause": clause, "error": error})

    def bad_message(self, name: str, what: str, clause: str, wire: Any) -> None:
        """Add a value that is well encoded, but no message."""
        self.bad(name, what, b"".join(encode(wire)), clause=clause, error="RemoteProtocolError")

    def sequence(self, what: str, clause: str, *steps: tuple[str, str]) -> None:
        """Add a sequence of (who sends, which file) whose last message is the illegal one."""
        assert all(file in self.files for _, file in steps)
        self.sequences.append(
            {"what": what, "clause": clause, "error": "RemoteProtocolError"}
            | {"steps": [{"from": sender, "file": file} for sender, file in steps]}
        )

    def manifest(self) -> str:
        """Give the text of manifest.json."""
        content = {"good": self.good, "malformed": self.malformed, "sequences": self.sequences, "digests": self.digests}
        # One entry, one line: a difference is then read entry by entry.
        lists = (
            f'  "{name}": [\n'
            + ",\n".join("    " + json.dumps(entry, ensure_ascii=True) for entry in entries)
            + "\n  ]"
            for name, entries in content.items()
        )
        return "{\n" + ",\n".join(lists) + "\n}\n"


def ids(*names: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(names, dtype=np.int64)


def counting(dtype: str, *shape: int) -> np.ndarray[Any, Any]:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


STATES = {"state": np.array([[0.5, -1.25, 3.0], [1e-3, 2.0, -0.0]])}
IMAGES = {"front": counting("|u1", 2, 2, 3, 3)}
TEXT = np.array(["push the T", "größer ✓"])


def feedback(observation: Observation, terminated: list[bool], truncated: list[bool], info: Entry) -> Feedback:
    n = len(terminated)
    rewards = np.array([0.5, -1.5][:n], dtype=np.float32)
    return Feedback(
        observation,
        ids(*range(n)),
        ids(*[3] * n),
        rewards,
        np.array(terminated, dtype=np.bool_),
        np.array(truncated, dtype=np.bool_),
        info,
    )


def add_messages(out: Vectors) -> None:
    features = ["reuse-feedback-obs", "env-spec", "seeded-reset"]
    known: Entry = {"protocol_version": 1, "server": "plugrl-bridges", "server_version": "1.0.0"}
    known |= {"algorithm": "ppo", "policy": "MlpPolicy", "action_horizon": 4, "action_dim": 2, "features": features}
    out.message("metadata_minimal", "metadata without any key: nothing is known", Metadata({}))
    out.message("metadata_full", "metadata with every known key", Metadata(known))

    both = Observation(IMAGES, STATES, TEXT)
    states = Observation({}, STATES)
    out.message(
        "infer_plain", "infer of two envs with one state, no images, blank text", Infer(states, ids(0, 1), ids(0, 0))
    )
    out.message("infer_full", "infer with an image, a state and text", Infer(both, ids(0, 1), ids(7, 0)))
    out.message(
        "infer_reuse_some",
        "infer of three envs, the middle one reuses its last feedback's observation: two rows are sent",
        Infer(states, ids(0, 1, 2), ids(4, 4, 4), reuse=np.array([False, True, False])),
    )
    out.message(
        "infer_reuse_all",
        "infer of two envs that both reuse: arrays with a leading dimension of 0",
        Infer(Observation({}, {"state": np.empty((0, 3))}), ids(0, 1), ids(4, 4), reuse=np.array([True, True])),
    )
    out.message(
        "infer_reuse_all_empty_maps",
        "infer of two envs that both reuse: empty maps instead of empty arrays",
        Infer(Observation(), ids(0, 1), ids(4, 4), reuse=np.array([True, True])),
    )
    box: Entry = {"type": "Box", "low": np.array([-np.float32(8)]), "high": np.array([np.float32(8)])}
    spec = {
        "observation_space": box | {"shape": [3], "dtype": "<f4"},
        "action_space": {"type": "Discrete", "n": 4, "start": 0, "dtype": "<i8"},
        "env_id": "Example-v0",
        "max_episode_steps": 200,
        "rank": 0,
        "features": features,
        "client": "example",
        "client_version": "1.0.0",
    }
    out.message(
        "infer_env_spec",
        "first infer of a connection, with env_spec",
        Infer(states, ids(0, 1), ids(0, 0), env_spec=spec),
    )
    out.message(
        "infer_reset_info",
        "infer that carries the infos of envs that were reset",
        Infer(states, ids(0, 1), ids(0, 0), reset_info={"seed": ids(3, 0), "_seed": np.array([True, False])}),
    )
    chains = np.array([0x0123456789ABCDEF, 0xFEDCBA9876543210], np.uint64)
    out.message(
        "infer_digest",
        "infer that carries the digest of each env as it stands (step-digest)",
        Infer(states, ids(0, 1), ids(4, 0), digest=chains),
    )
    out.foreign(
        "infer_text_list",
        "text as a msgpack array of n strings",
        Infer(states, ids(0, 1), ids(0, 0)).to_wire()
        | {"data": {"images": {}, "states": STATES, "text": ["push", "größer ✓"]}},
    )
    out.foreign(
        "infer_text_bare",
        "text as one string for the whole batch",
        Infer(states, ids(0, 1), ids(0, 0)).to_wire()
        | {"data": {"images": {}, "states": STATES, "text": "push the T"}},
    )

    out.message("action_h1", "action with a horizon of 1: [1, 2, 2]", Action(ids(0, 1), counting("<f4", 1, 2, 2)))
    out.message(
        "action_h4", "action with a horizon of 4, time-major: [4, 2, 2]", Action(ids(0, 1), counting("<f4", 4, 2, 2))
    )
    out.message("action_f8", "action of a float64 policy", Action(ids(0, 1), counting("<f8", 1, 2, 2) / 8))
    out.message("action_discrete", "discrete action: integers [1, 2, 1]", Action(ids(0, 1), counting("<i8", 1, 2, 1)))
    out.message(
        "action_without_env_ids",
        "action without env_ids: the infer's order holds",
        Action(None, counting("<f4", 1, 2, 2)),
    )
    out.message(
        "action_reset",
        "action that resets env 1 with a seed (seeded-reset): its row is to be ignored",
        Action(ids(0, 1), counting("<f4", 1, 2, 2), ResetRequest(ids(1), (42,), ({"difficulty": 2},))),
    )
    out.message(
        "action_reset_all",
        "action that resets both envs, one of them without a seed",
        Action(ids(0, 1), counting("<f4", 1, 2, 2), ResetRequest(ids(0, 1), (7, None), (None, None))),
    )

    going = [False, False]
    out.message("feedback_plain", "feedback of two envs that go on", feedback(states, going, going, {}))
    out.message("feedback_full", "feedback with an image, a state and text", feedback(both, going, going, {}))
    episode = {
        "r": np.array([12.5, 0.0]),
        "l": ids(40, 0),
        "s": np.array([True, False]),
        "mask": np.array([True, False]),
    }
    out.message(
        "feedback_episode",
        "feedback on which env 0 terminates, with the episode record",
        feedback(states, [True, False], going, {"episode": episode}),
    )
    info: Entry = {"lives": ids(3, 2), "won": np.array([True, False]), "_won": np.array([True, False]), "task": "pick"}
    out.message(
        "feedback_info",
        "feedback with infos: `won` holds for env 0 only (its mask is `_won`), `task` for both; env 1 is truncated",
        feedback(states, going, [False, True], info | {"detail": {"x": np.array([[1.5, 2.5], [3.5, 4.5]])}}),
    )
    out.message(
        "feedback_empty", "empty feedback: every env of the action was reset", feedback(Observation(), [], [], {})
    )
    out.message(
        "feedback_digest",
        "feedback that carries the digest of each env after its step (step-digest)",
        replace(feedback(states, going, going, {}), digest=chains),
    )
    rewards = feedback(states, going, going, {}).to_wire()
    rewards["data"]["rewards"] = np.array([0.5, -1.5])
    out.foreign("feedback_f8_rewards", "feedback with float64 rewards", rewards)


def add_arrays(out: Vectors) -> None:
    out.value("arrays/b1", "bools", np.array([True, False, True]))
    for order in "<>":
        for kind, sizes in (("u", (1, 2, 4, 8)), ("i", (1, 2, 4, 8))):
            for size in sizes:
                dtype = np.dtype(f"{order}{kind}{size}")
                if size == 1 and order == ">":
                    continue
                ends = np.iinfo(dtype)
                array = np.array([[ends.min, 0, 1], [2, 100, ends.max]], dtype=dtype)
                name = f"{kind}{size}" if order == "<" else f"{kind}{size}_big_endian"
                out.value(f"arrays/{name}", f"{dtype.str}, from its least to its largest value", array)
        for size in (2, 4, 8):
            dtype = np.dtype(f"{order}f{size}")
            array = np.array([[0.0, -0.5, 1.0], [2.25, -1024.0, 0.0999755859375]], dtype=dtype)
            out.value(f"arrays/f{size}" if order == "<" else f"arrays/f{size}_big_endian", dtype.str, array)
    out.value("arrays/text", "<U: UTF-32, padded with NUL to the longest", np.array(["", "abc", "ß✓🤖"]))
    out.value("arrays/text_big_endian", ">U", np.array(["", "abc", "ß✓🤖"], dtype=">U3"))
    out.value("arrays/zero_dimensional", "an array of shape []", np.array(2.5, dtype=np.float32))
    out.value("arrays/zero_dimensional_bool", "a bool array of shape []", np.array(True))
    out.value("arrays/empty", "an array of shape [0, 3]: no data", np.empty((0, 3), np.float32))
    out.value("arrays/one_element", "an array of shape [1]", np.array([7]))
    out.value("arrays/four_dimensional", "shape [2, 1, 3, 2]", counting("<i2", 2, 1, 3, 2))
    out.value("arrays/long_extent", "an extent above 127, which msgpack writes with a prefix", counting("|u1", 200, 1))
    out.value("arrays/data_16", "more than 255 bytes of data: bin 16", counting("<i2", 150))
    out.value("arrays/data_32", "more than 65535 bytes of data: bin 32", np.zeros((2, 100, 110, 3), np.uint8))
    out.value(
        "arrays/not_c_order", "made of a transposed array: the data is in C order all the same", counting("<i4", 2, 3).T
    )

    def raw(dtype: Any, data: bytes, shape: list[int]) -> Entry:
        wire = {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}
        return {"wire": wire, "bytes": packb(wire)}

    four = np.array([1.0, 2.0], dtype="<f4")
    out.accepted("arrays/dtype_as_bin", "dtype as bin", raw(b"<f4", four.tobytes(), [2])["bytes"], four)
    wire = raw("<f4", four.tobytes(), [2])["wire"]
    other = {key: wire[key] for key in (b"shape", b"dtype", b"data", b"__ndarray__")}
    out.accepted("arrays/other_key_order", "the four keys in another order", packb(other), four)
    out.accepted(
        "arrays/bool_of_2",
        "a bool byte that is neither 0 nor 1 is true",
        raw("|b1", b"\0\2", [2])["bytes"],
        np.array([False, True]),
    )

    for scalar in (np.bool_(True), np.uint8(200), np.int16(-300), np.int64(-(2**40)), np.float16(0.5), np.float32(0.1)):
        out.value(f"scalars/{scalar.dtype.name}", f"a numpy scalar of {scalar.dtype.str}", scalar)
    generic = {b"__npgeneric__": True, b"data": 0.1, b"dtype": "<f8"}
    out.accepted(
        "scalars/float64_as_map", "a float64 scalar as a map; we write a msgpack float", packb(generic), np.float64(0.1)
    )


def add_values(out: Vectors) -> None:
    numbers = [0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1]
    numbers += [-1, -32, -33, -128, -129, -32768, -32769, -(2**31), -(2**31) - 1, -(2**63)]
    out.value("values/ints", "ints at the edges of every msgpack form", numbers)
    out.value(
        "values/others", "nil, bools, floats, str, bin", [None, False, True, 0.5, -1e300, "", "größer ✓", b"\0\xff"]
    )
    out.value(
        "values/str_lengths",
        "str of 31, 32, 255, 256 and 65536 characters",
        ["x" * n for n in (31, 32, 255, 256, 65536)],
    )
    out.value("values/list_16", "a list of 16: array 16", list(range(16)))
    out.value("values/map_16", "a map of 16: map 16", {f"key{i:02d}": i for i in range(16)})
    nested: Any = 1
    for _ in range(MAX_DEPTH):
        nested = [nested]
    out.value("values/deepest", f"lists nested {MAX_DEPTH} levels deep, the most that is accepted", nested)
    out.accepted("values/float32", "a msgpack float 32", b"\xca\x3f\x00\x00\x00", 0.5)
    out.accepted("values/wide_int", "a small int in the widest form", b"\xcf" + (5).to_bytes(8, "big"), 5)
    out.accepted("values/wide_map", "an empty map in the widest form", b"\xdf\0\0\0\0", {})


def packb(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def add_malformed_bytes(out: Vectors) -> None:
    usual = {b"__ndarray__": True, b"data": bytes(8), b"dtype": "<f4", b"shape": [2]}
    out.bad("empty", "no bytes at all", b"")
    out.bad("json", "JSON", json.dumps({"message_type": "metadata", "data": {}}).encode())
    out.bad("pickle", "a Python pickle (protocol 4, of an empty dict)", bytes.fromhex("80049503000000000000007d942e"))
    out.bad("ext_type", "an ndarray as a msgpack ext type", packb(msgpack.ExtType(78, packb([[2], "<f4", bytes(8)]))))
    out.bad("timestamp", "a msgpack timestamp, which is an ext type", packb(msgpack.Timestamp(1)))
    out.bad("str_keys", "an array with str keys", packb({str(key, "ascii"): item for key, item in usual.items()}))
    nd = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [2], b"data": bytes(8)}
    out.bad("msgpack_numpy", "an array of the msgpack-numpy package", packb(nd))
    nd_str = {str(key, "ascii"): item for key, item in nd.items()}
    out.bad("msgpack_numpy_str", "the same with str keys", packb(nd_str))
    for name, dtype, size in (
        ("void", "|V8", 8), ("object", "|O", 8), ("complex", "<c8", 8), ("bytes", "|S4", 4), ("datetime", "<M8[s]", 8),
        ("longdouble", "<f16", 16), ("no_size", "<f", 4), ("native_order", "=f4", 4), ("no_order", "f4", 4),
        ("bar_order", "|f4", 4), ("no_such_size", "<i3", 3), ("structured", "[('a', '<f4')]", 4),
        ("empty_text", "<U0", 0),
    ):  # fmt: skip
        array = {b"__ndarray__": True, b"data": bytes(size), b"dtype": dtype, b"shape": [1]}
        out.bad(f"dtype_{name}", f"dtype {dtype}", packb(array))
    out.bad("dtype_int", "a dtype that is no str", packb(usual | {b"dtype": 4}))
    out.bad("data_short", "data one byte too short", packb(usual | {b"data": bytes(7)}))
    out.bad("data_long", "data one byte too long", packb(usual | {b"data": bytes(9)}))
    out.bad("data_str", "data as str", packb(usual | {b"data": "\0" * 8}))
    out.bad("data_list", "data as a list", packb(usual | {b"data": [0.0, 0.0]}))
    out.bad("shape_negative", "a negative extent", packb(usual | {b"shape": [-1, -2]}))
    out.bad("shape_float", "a float in a shape", packb(usual | {b"shape": [2.0]}))
    out.bad("shape_bool", "a bool in a shape", packb(usual | {b"shape": [2, True]}))
    out.bad("shape_int", "a shape that is no list", packb(usual | {b"shape": 2}))
    out.bad("shape_huge", "a huge extent beside a zero", packb(usual | {b"data": b"", b"shape": [0, 2**63]}))
    out.bad("shape_33", "33 dimensions", packb(usual | {b"shape": [2] + [1] * 32}))
    out.bad("key_missing", "an array without its shape", packb({key: usual[key] for key in list(usual)[:3]}))
    out.bad("key_extra", "an array with strides", packb(usual | {b"strides": [4]}))
    out.bad("mark_false", "__ndarray__ is false", packb(usual | {b"__ndarray__": False}))
    out.bad(
        "text_surrogate",
        "a <U array with a surrogate",
        packb(usual | {b"dtype": "<U1", b"data": (0xD800).to_bytes(4, "little") * 2}),
        clause="3.4",
    )
    out.bad(
        "text_beyond_unicode",
        "a <U array with 0x110000",
        packb(usual | {b"dtype": "<U1", b"data": (0x110000).to_bytes(4, "little") * 2}),
        clause="3.4",
    )
    generic = {b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}
    out.bad("scalar_range", "a |u1 scalar of 300", packb(generic))
    out.bad("scalar_fraction", "an <i4 scalar of 1.5", packb(generic | {b"data": 1.5, b"dtype": "<i4"}))
    out.bad("scalar_str", "an <i4 scalar of a str", packb(generic | {b"data": "5", b"dtype": "<i4"}))
    out.bad("depth_bomb", "a thousand lists in each other", b"\x91" * 1000 + b"\xc0")
    out.bad("depth_bomb_maps", "a thousand maps in each other", b"\x81\xa1a" * 1000 + b"\xc0")
    out.bad("one_too_deep", f"{MAX_DEPTH + 1} lists in each other", b"\x91" * (MAX_DEPTH + 1) + b"\xc0")
    out.bad("item_bomb", "a list that announces 2**32 - 1 items", b"\xdd\xff\xff\xff\xff")
    out.bad("item_bomb_map", "a map that announces 2**32 - 1 items", b"\xdf\xff\xff\xff\xff")
    out.bad("item_bomb_nested", "lists that announce 900000 items each", b"\xdd\x00\x0d\xbb\xa0" * 20)
    out.bad("bin_bomb", "a bin that announces 2**32 - 1 bytes", b"\xc6\xff\xff\xff\xff")
    whole = out.files["messages/infer_plain.bin"]
    out.bad("truncated", "a message that ends in the middle", whole[: len(whole) // 2])
    out.bad("truncated_by_one", "a message without its last byte", whole[:-1])
    out.bad("trailing", "a byte after the message", whole + b"\xc0")
    out.bad("two_messages", "two messages in one frame", whole + whole)
    out.bad("duplicate_key", "a key that stands twice", b"\x82\xa1a\x01\xa1a\x02")
    out.bad("int_key", "an int for a key", packb({1: 2}))
    out.bad("list_key", "a list for a key", b"\x81\x91\x01\x02")
    out.bad("bad_utf8", "a str that is no UTF-8", b"\xa2\xff\xfe")
    out.bad("bad_utf8_key", "a key that is no UTF-8", b"\x81\xa2\xff\xfe\x01")
    out.bad("surrogate_utf8", "a surrogate in UTF-8", b"\xa3\xed\xa0\x80")
    out.bad("never_used", "the byte 0xc1, which msgpack never uses", b"\xc1")


def add_malformed_messages(out: Vectors) -> None:
    def changed(wire: Entry, *path: str, to: Any) -> Entry:
        copy = dict(wire)
        copy[path[0]] = changed(copy[path[0]], *path[1:], to=to) if len(path) > 1 else to
        return copy

    def without(wire: Entry, *path: str) -> Entry:
        if len(path) > 1:
            return wire | {path[0]: without(wire[path[0]], *path[1:])}
        return {key: item for key, item in wire.items() if key != path[0]}

    infer = Infer(Observation(IMAGES, STATES, TEXT), ids(0, 1), ids(0, 0)).to_wire()
    going = [False, False]
    back = feedback(Observation({}, STATES), going, going, {}).to_wire()
    action = Action(ids(0, 1), counting("<f4", 1, 2, 2)).to_wire()
    bad = out.bad_message

    bad("message_list", "a list in place of a map", "2", [1, 2])
    bad("message_type_missing", "no message_type", "2", without(infer, "message_type"))
    bad("message_type_unknown", "a message_type that is none of the four", "2", infer | {"message_type": "step"})
    bad("message_type_int", "a message_type that is no str", "2", infer | {"message_type": 1})
    bad("message_type_bin", "message_type as a bin key", "2", {b"message_type": "infer"})
    bad("metadata_data", "metadata with a list for data", "5.1", {"message_type": "metadata", "data": []})
    for key in ("data", "env_indices", "step_ids"):
        bad(f"infer_without_{key}", f"infer without {key}", "5.2", without(infer, key))
        bad(f"feedback_without_{key}", f"feedback without {key}", "5.4", without(back, key))
    for key in ("images", "states", "text"):
        bad(f"infer_without_{key}", f"an observation without {key}", "5.2", without(infer, "data", key))
    bad("infer_extra_key", "an observation with another key", "5.2", changed(infer, "data", "depth", to={}))
    bad("infer_no_envs", "infer that names no env", "4.4", Infer(Observation(), ids(), ids()).to_wire())
    bad("infer_twice", "infer that names an env twice", "4.4", infer | {"env_indices": ids(1, 1)})
    bad("infer_negative", "infer with a negative env", "4.4", infer | {"env_indices": ids(0, -1)})
    bad("infer_large", "infer with an env that is not small", "4.4", infer | {"env_indices": ids(0, 2**31)})
    bad("infer_indices_list", "env_indices as a list", "5.2", infer | {"env_indices": [0, 1]})
    bad("infer_indices_float", "env_indices as floats", "5.2", infer | {"env_indices": np.array([0.0, 1.0])})
    bad("infer_indices_2d", "env_indices of two dimensions", "5.2", infer | {"env_indices": ids(0, 1)[None]})
    bad("infer_step_ids_short", "step_ids of another length", "5.2", infer | {"step_ids": ids(0)})
    bad(
        "infer_rows",
        "a state with three rows for two envs",
        "5.2",
        changed(infer, "data", "states", "state", to=np.zeros((3, 3))),
    )
    bad(
        "infer_image_rows",
        "an image with one row for two envs",
        "5.2",
        changed(infer, "data", "images", "front", to=IMAGES["front"][:1]),
    )
    bad(
        "infer_image_float",
        "an image of floats",
        "5.2",
        changed(infer, "data", "images", "front", to=np.zeros((2, 2, 3, 3))),
    )
    bad(
        "infer_image_3d",
        "an image without channels",
        "5.2",
        changed(infer, "data", "images", "front", to=IMAGES["front"][..., 0]),
    )
    bad("infer_state_list", "a state as a list", "5.2", changed(infer, "data", "states", "state", to=[[0.5], [1.5]]))
    bad(
        "infer_state_0d",
        "a state without a leading dimension",
        "5.2",
        changed(infer, "data", "states", "state", to=np.array(1.0)),
    )
    bad("infer_text_short", "one text in an array for two envs", "3.4", changed(infer, "data", "text", to=TEXT[:1]))
    bad("infer_text_list_short", "one text in a list for two envs", "3.4", changed(infer, "data", "text", to=["push"]))
    bad("infer_text_nil", "text is nil", "3.4", changed(infer, "data", "text", to=None))
    bad("infer_text_numbers", "text as numbers", "3.4", changed(infer, "data", "text", to=ids(1, 2)))
    bad("infer_reuse_int", "reuse as ints", "10.1", infer | {"reuse": ids(0, 0)})
    bad("infer_reuse_list", "reuse as a list", "10.1", infer | {"reuse": [False, False]})
    bad("infer_reuse_short", "reuse of another length", "10.1", infer | {"reuse": np.array([False])})
    bad("infer_reuse_rows", "a row is marked, yet sent", "10.1", infer | {"reuse": np.array([False, True])})
    bad("infer_reset_info", "a reset_info that cannot be split", "env-spec", infer | {"reset_info": {"task": "pick"}})
    bad("infer_digest_signed", "digests as signed ints", "step-digest", infer | {"digest": ids(1, 2)})
    bad("infer_env_spec_list", "env_spec is no map", "env-spec", infer | {"env_spec": []})

    bad("action_without_data", "action without data", "5.3", without(action, "data"))
    bad("action_without_action", "action without its array", "5.3", without(action, "data", "action"))
    bad("action_list", "action as a list", "5.3", changed(action, "data", "action", to=[[[0.0]]]))
    bad("action_1d", "action of one dimension", "5.3", changed(action, "data", "action", to=np.zeros(2)))
    bad("action_h0", "action of no steps", "5.3", changed(action, "data", "action", to=np.zeros((0, 2, 2))))
    bad("action_text", "action of text", "5.3", changed(action, "data", "action", to=TEXT[None]))
    bad(
        "action_env_major",
        "action with the envs first",
        "5.3",
        changed(action, "data", "action", to=np.zeros((2, 1, 2))),
    )
    bad(
        "action_reset_unknown",
        "a reset of an env that is not in the action",
        "seeded-reset",
        action | {"reset": ResetRequest(ids(5), (1,), (None,)).to_wire()},
    )
    bad(
        "action_reset_seeds",
        "a reset with one seed for two envs",
        "seeded-reset",
        action | {"reset": ResetRequest(ids(0, 1), (1,), (None, None)).to_wire()},
    )
    bad(
        "action_reset_negative",
        "a reset with a negative seed",
        "seeded-reset",
        action | {"reset": ResetRequest(ids(0), (-1,), (None,)).to_wire()},
    )

    for key in ("obs", "rewards", "terminated", "truncated", "info"):
        bad(f"feedback_without_{key}", f"feedback without {key}", "5.4", without(back, "data", key))
    bad(
        "feedback_extra_key",
        "feedback with a sixth key in data",
        "5.4",
        changed(back, "data", "done", to=np.array(going)),
    )
    bad("feedback_twice", "feedback that names an env twice", "4.4", back | {"env_indices": ids(1, 1)})
    bad("feedback_rewards_int", "rewards as ints", "5.4", changed(back, "data", "rewards", to=ids(1, 1)))
    bad("feedback_rewards_short", "rewards of another length", "5.4", changed(back, "data", "rewards", to=np.zeros(1)))
    bad("feedback_rewards_list", "rewards as a list", "5.4", changed(back, "data", "rewards", to=[0.0, 0.0]))
    bad("feedback_terminated_int", "terminated as ints", "5.4", changed(back, "data", "terminated", to=ids(0, 0)))
    bad(
        "feedback_truncated_short",
        "truncated of another length",
        "5.4",
        changed(back, "data", "truncated", to=np.array([False])),
    )
    bad(
        "feedback_obs_rows",
        "obs with three rows for two envs",
        "5.4",
        changed(back, "data", "obs", "states", "state", to=np.zeros((3, 3))),
    )
    bad("feedback_obs_list", "obs as a list", "5.4", changed(back, "data", "obs", to=[]))
    bad("feedback_info_list", "info as a list of maps", "5.4", changed(back, "data", "info", to=[{}, {}]))
    bad(
        "feedback_info_unsplittable",
        "an info without an array of length 2",
        "5.4",
        changed(back, "data", "info", to={"task": "pick"}),
    )
    bad(
        "feedback_info_msgpack_list",
        "an info with a list where an array belongs",
        "5.4",
        changed(back, "data", "info", to={"lives": [3, 2]}),
    )
    bad(
        "feedback_info_too_deep",
        "an array of length 2 that is two maps down",
        "5.4",
        changed(back, "data", "info", to={"a": {"b": {"c": ids(1, 2)}}}),
    )


def add_sequences(out: Vectors) -> None:
    def file(name: str) -> str:
        return f"messages/{name}.bin"

    opened = ("server", file("metadata_full"))
    asked = ("client", file("infer_plain"))
    answered = ("server", file("action_h4"))
    back = ("client", file("feedback_plain"))
    lean = ("client", file("infer_reuse_all"))
    out.sequence("an infer before the metadata", "4.2", asked)
    out.sequence("an action in place of the metadata", "4.2", answered)
    out.sequence("metadata twice", "4.2", opened, opened)
    out.sequence("an action that nobody asked for", "4.2", opened, answered)
    out.sequence("a feedback before any infer", "4.2", opened, back)
    out.sequence("two infers in a row", "4.2", opened, asked, asked)
    out.sequence("a feedback in place of waiting for the action", "4.2", opened, asked, back)
    out.sequence("an infer where the feedback was due", "4.2", opened, asked, answered, asked)
    out.sequence("two feedbacks in a row", "4.2", opened, asked, answered, back, back)
    out.sequence("two actions in a row", "4.2", opened, asked, answered, answered)
    out.sequence(
        "an empty feedback, but no env was reset", "5.4", opened, asked, answered, ("client", file("feedback_empty"))
    )
    out.sequence("reuse without a feedback on this connection", "10.1", opened, lean)
    out.sequence(
        "reuse of env 0 after its episode ended",
        "10.1",
        opened,
        asked,
        answered,
        ("client", file("feedback_episode")),
        lean,
    )
    out.sequence(
        "reuse of env 1 after it was reset",
        "10.1",
        opened,
        asked,
        ("server", file("action_reset")),
        ("client", "sequences/feedback_of_env_0.bin"),
        lean,
    )
    out.sequence(
        "reuse, which the metadata did not list",
        "10.1",
        ("server", file("metadata_minimal")),
        asked,
        answered,
        back,
        lean,
    )
    out.sequence(
        "an action for envs in another order", "5.3", opened, asked, ("server", "sequences/action_other_order.bin")
    )
    out.sequence(
        "an action with more steps than announced", "5.1", opened, asked, ("server", "sequences/action_h5.bin")
    )
    out.sequence(
        "a reset, which the metadata did not list",
        "seeded-reset",
        ("server", file("metadata_minimal")),
        asked,
        ("server", file("action_reset")),
    )
    out.sequence("digests, which the metadata did not list", "step-digest", opened, ("client", file("infer_digest")))
    out.sequence(
        "digests in the feedback alone",
        "step-digest",
        opened,
        asked,
        answered,
        ("client", file("feedback_digest")),
    )


def add_digests(out: Vectors) -> None:
    for case in CASES:
        digest = EnvDigest(case.action, case.observation)
        file = f"digests/{case.name}.bin"
        events: list[Entry] = []
        rows = []
        for event in events_of(case):
            if event.action is None:
                digest.reset(event.observation)
                events.append({"reset": True})
            else:
                digest.take(event.action)
                digest.give(event.reward, event.terminated, event.truncated, event.observation)
                events.append(
                    {"reset": False, "action": plain(list(event.action)), "reward": event.reward}
                    | {"terminated": event.terminated, "truncated": event.truncated}
                )
            events[-1] |= {"observation": plain(list(event.observation)), "chain": f"{digest.value:016x}"}
            rows.append(words_of_event(case, event))
        out.files[file] = b"".join(struct.pack(f"<{len(row)}I", *row) for row in rows)
        entries = {
            name: [{"name": each.name, "dtype": each.dtype.str, "shape": list(each.shape)} for each in parts]
            for name, parts in (("action", case.action), ("observation", case.observation))
        }
        out.digests.append({"file": file, "what": case.what, "words": len(rows[0]), **entries, "events": events})


def build() -> Vectors:
    """Make all vectors."""
    out = Vectors()
    add_messages(out)
    add_arrays(out)
    add_values(out)
    add_malformed_bytes(out)
    add_malformed_messages(out)
    one = Observation({}, {"state": STATES["state"][:1]})
    for name, message in (
        ("feedback_of_env_0", feedback(one, [False], [False], {})),
        ("action_other_order", Action(ids(1, 0), counting("<f4", 1, 2, 2))),
        ("action_h5", Action(ids(0, 1), counting("<f4", 5, 2, 2))),
    ):
        out.files[f"sequences/{name}.bin"] = b"".join(to_bytes(message))
    add_sequences(out)
    add_digests(out)
    return out


def main() -> None:
    """Write the files anew."""
    vectors = build()
    for old in HERE.rglob("*.bin"):
        old.unlink()
    for name, data in vectors.files.items():
        path = HERE / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    (HERE / "manifest.json").write_text(vectors.manifest(), encoding="ascii", newline="\n")


if __name__ == "__main__":
    main()
