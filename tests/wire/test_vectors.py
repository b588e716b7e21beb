"""Hold the golden vectors to the codec, to the sessions, and to an independent reader of the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from plugrl_bridges import errors
from plugrl_bridges.wire.codec import decode, encode
from plugrl_bridges.wire.messages import Infer, parse, parse_bytes, to_bytes
from plugrl_bridges.wire.session import ClientSession, Due, ServerSession
from tests.vectors.generate import HERE, build, plain

MANIFEST = json.loads((HERE / "manifest.json").read_text(encoding="ascii"))
GOOD, MALFORMED, SEQUENCES = MANIFEST["good"], MANIFEST["malformed"], MANIFEST["sequences"]


def read(file: str) -> bytes:
    return (HERE / file).read_bytes()


def name_of(entry: dict[str, Any]) -> str:
    return Path(entry.get("file", entry["what"])).with_suffix("").as_posix()


each_good = pytest.mark.parametrize("entry", GOOD, ids=name_of)


def same(left: Any, right: Any) -> bool:
    """Compare as JSON text, where 1, 1.0 and true differ, and so do 0.0 and -0.0."""
    return json.dumps(left) == json.dumps(right)


def test_committed_files_are_what_the_encoder_makes_today() -> None:
    vectors = build()
    committed = {path.relative_to(HERE).as_posix(): path.read_bytes() for path in HERE.rglob("*.bin")}
    assert sorted(committed) == sorted(vectors.files)
    changed = [name for name, data in vectors.files.items() if committed[name] != data]
    assert changed == []
    assert (HERE / "manifest.json").read_text(encoding="ascii") == vectors.manifest()


def test_every_file_is_in_the_manifest() -> None:
    listed = [entry["file"] for entry in (*GOOD, *MALFORMED, *MANIFEST["digests"])]
    listed += [step["file"] for entry in SEQUENCES for step in entry["steps"]]
    assert {path.relative_to(HERE).as_posix() for path in HERE.rglob("*.bin")} == set(listed)


@each_good
def test_decoding_gives_the_content(entry: dict[str, Any]) -> None:
    assert same(plain(decode(read(entry["file"]))), entry["content"])


@each_good
def test_encoding_the_decoded_gives_the_bytes_if_canonical(entry: dict[str, Any]) -> None:
    again = b"".join(encode(decode(read(entry["file"]))))
    assert (again == read(entry["file"])) is entry["canonical"]
    assert same(plain(decode(again)), entry["content"]) or entry["file"] == "scalars/float64_as_map.bin"


@pytest.mark.parametrize("entry", [entry for entry in GOOD if entry["type"] != "value"], ids=name_of)
def test_messages_parse_and_come_out_as_they_were(entry: dict[str, Any]) -> None:
    message = parse_bytes(read(entry["file"]))
    assert message.message_type == entry["type"]
    again = b"".join(to_bytes(message))
    if "infer_text_" not in entry["file"]:  # there, text becomes the array that we send
        assert again == read(entry["file"])
    assert parse_bytes(again).message_type == entry["type"]


@pytest.mark.parametrize("form", ["list", "bare"])
def test_text_in_the_other_forms_is_one_str_per_env(form: str) -> None:
    message = parse_bytes(read(f"messages/infer_text_{form}.bin"))
    assert isinstance(message, Infer)
    assert message.observation.text is not None
    assert message.observation.text.tolist() == (["push", "größer ✓"] if form == "list" else ["push the T"] * 2)


def openpi_pack(value: Any) -> Any:
    """Do what openpi's msgpack_numpy does, in the words of clause 3."""
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "VOc":
        raise ValueError(f"unsupported dtype {value.dtype}")
    if isinstance(value, np.ndarray):
        data, dtype = value.tobytes(), value.dtype.str
        return {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": value.shape}
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    return value


def openpi_unpack(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        return np.ndarray(value[b"shape"], np.dtype(value[b"dtype"]), value[b"data"] or None)
    if b"__npgeneric__" in value:
        return np.dtype(value[b"dtype"]).type(value[b"data"])
    return value


@pytest.mark.parametrize("entry", [entry for entry in GOOD if entry["canonical"]], ids=name_of)
def test_an_openpi_style_hook_reads_and_writes_the_same_bytes(entry: dict[str, Any]) -> None:
    data = read(entry["file"])
    found = msgpack.unpackb(data, object_hook=openpi_unpack, strict_map_key=False)
    assert same(plain(found), entry["content"])
    assert msgpack.packb(found, default=openpi_pack) == data
    assert b"".join(encode(found)) == data


@pytest.mark.parametrize(
    "value",
    [np.float64(1.5), np.str_("text"), np.str_(""), np.bytes_(b"raw"), np.float32(1.5), np.bool_(False), np.int8(-3)],
    ids=repr,
)
def test_numpy_scalars_are_packed_as_openpi_packs_them(value: np.generic) -> None:
    assert b"".join(encode(value)) == msgpack.packb(value, default=openpi_pack)


@pytest.mark.parametrize("entry", MALFORMED, ids=name_of)
def test_malformed_bytes_are_refused_by_clause(entry: dict[str, Any]) -> None:
    with pytest.raises(errors.RemoteProtocolError) as caught:
        parse_bytes(read(entry["file"]))
    assert type(caught.value) is getattr(errors, entry["error"])
    assert caught.value.clause == entry["clause"]
    assert str(caught.value).startswith(f"[{entry['clause']}] ")
    assert len(str(caught.value)) < 500
    if entry["error"] == "RemoteProtocolError":
        decode(read(entry["file"]))  # what is wrong is the message, not its bytes


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("json", "JSON"),
        ("pickle", "pickle"),
        ("ext_type", "ext type"),
        ("str_keys", "another numpy dialect"),
        ("msgpack_numpy", "another numpy dialect"),
        ("message_type_bin", "as bin, expected str"),
        ("data_short", "needs 8 bytes, got 7"),
        ("dtype_object", "'|O' is refused"),
        ("infer_twice", r"names an env twice: \[1, 1\]"),
        ("infer_rows", "leading dimension of 3, expected 2 rows"),
    ],
)
def test_the_error_names_what_came(file: str, named: str) -> None:
    with pytest.raises(errors.RemoteProtocolError, match=named.replace("|", r"\|")):
        parse_bytes(read(f"malformed/{file}.bin"))


@pytest.mark.parametrize("entry", SEQUENCES, ids=name_of)
def test_illegal_sequences_are_refused_at_their_last_message(entry: dict[str, Any]) -> None:
    """Play the steps to the end that receives the last one; what that end sends itself, its session sends."""
    *legal, last = entry["steps"]
    receiver = "client" if last["from"] == "server" else "server"
    server, client = ServerSession(), ClientSession()
    for step in legal:
        data = read(step["file"])
        if step["from"] != receiver:
            (server if receiver == "server" else client).receive(data)
        elif receiver == "server":
            message: Any = parse(decode(data))
            send = server.open if server.state is Due.METADATA else server.answer
            assert b"".join(send(message)) == data
        else:
            message = parse(decode(data))
            assert (
                b"".join(client.infer(message) if message.message_type == "infer" else client.feedback(message)) == data
            )
    with pytest.raises(errors.RemoteProtocolError) as caught:
        (server if receiver == "server" else client).receive(read(last["file"]))
    assert caught.value.clause == entry["clause"]
