"""The file of a recording: what goes in comes out, and nothing else is taken for one."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

import certify
import jax_kernels
from certify.bounds import RECORDED_BOUNDS
from certify.recording import (
    CERTIFICATE_FIELDS,
    LayerPasses,
    Recording,
    is_recording,
    merge_recordings,
    read_recording,
    record_fields,
    write_recording,
)
from tests.certify.recordings import (
    EVIL,
    block,
    layer_of,
    recorded,
    recording_of,
    settings_of,
    tensors,
)


def same_layer(one: LayerPasses, other: LayerPasses) -> None:
    assert (one.name, one.settings) == (other.name, other.settings)
    for name in ("bounds", "certificate", "passes"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert len(one.kept) == len(other.kept)
    for ours, theirs in zip(one.kept, other.kept, strict=True):
        places = [(kept.pass_index, kept.batch, kept.head) for kept in (ours, theirs)]
        assert places[0] == places[1]
        for name in ("rows", "value_max"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        for name in ("query", "key"):
            arrays = (getattr(ours, name), getattr(theirs, name))
            assert arrays[0].dtype == arrays[1].dtype
            np.testing.assert_array_equal(arrays[0].values, arrays[1].values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_round_trip(tmp_path: Path, dtype: str) -> None:
    """Bit for bit, kept rows of every dtype too. Catches bytes read as another type."""
    arrays = tensors(("gaussian 1", "sink anti"), dtype, rows=40, keys=70)
    whole = recorded(arrays, keep_rows=3, causal=True)
    path = tmp_path / "r.safetensors"
    write_recording(path, whole)
    back = read_recording(path)
    assert is_recording(path) and len(back.layers) == 1
    same_layer(back.layers[0], whole.layers[0])
    assert back.layers[-1].settings.causal and back.layers[0].kept[0].rows.tolist() == [0, 19, 39]
    for name in ("families", "tolerance", "not_recorded", "created_by", "settings", "fields"):
        assert getattr(back, name) == getattr(whole, name)


def test_texts_and_numbers_survive(tmp_path: Path) -> None:
    """Any name, NaN and infinities, several layers. Catches a name that becomes a path or a key."""
    layers = [
        layer_of([block(np.inf), block(np.nan)], name=name, passes=(3, 9), group="text")
        for name in (EVIL, "../../etc", "blocks.0", "")
    ]
    path = tmp_path / "r.safetensors"
    write_recording(path, recording_of(*layers, not_recorded=7, settings={EVIL: [1, None]}))
    back = read_recording(path)
    assert back.not_recorded == 7 and back.settings == {EVIL: [1, None]}
    for ours, theirs in zip(layers, back.layers, strict=True):
        same_layer(ours, theirs)
    assert [layer.name for layer in back.layers[1:3]] == ["../../etc", "blocks.0"]


def test_lanes_have_one_source() -> None:
    """What is recorded is what is read. Catches two lists of lanes that drift apart."""
    assert record_fields(RECORDED_BOUNDS) == certify.RECORD_FIELDS
    assert jax_kernels.CERTIFICATE_FIELDS == CERTIFICATE_FIELDS


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "r.safetensors"
    write_recording(path, recorded(tensors(("gaussian 1",), rows=16, keys=40), keep_rows=2))
    return path


def refused(path: Path, *words: str) -> None:
    """One line that names the file, on opening or on reading the layer."""
    with pytest.raises(ValueError) as error:
        list(read_recording(path).layers)
    message = str(error.value)
    assert message.startswith(str(path)) and "\n" not in message, message
    for word in words:
        assert word in message, message


def test_files_that_are_none(file: Path, tmp_path: Path) -> None:
    """Missing, a directory, truncated, other formats. Catches a traceback, and unpickling."""

    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return (Path.touch, (str(tmp_path / "exploded"),))

    refused(tmp_path / "none", "cannot be read")
    refused(tmp_path, "cannot be read")
    whole = file.read_bytes()
    for content in (whole[:-5], whole[:300], whole[:4], b"", b"text", pickle.dumps(Bomb())):
        file.write_bytes(content)
        refused(file, "not a complete .safetensors file")
    assert not (tmp_path / "exploded").exists()


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, str]], object]) -> None:
    """Change tensors and metadata of a file in place."""
    with safetensors.safe_open(path, "np") as opened:
        metadata = dict(opened.metadata())
    arrays = load_file(path)
    change(arrays, metadata)
    save_file(arrays, path, metadata=metadata)


def test_foreign_and_newer_files(file: Path) -> None:
    """Another schema, another version. Catches a newer file read by the rules of the old one."""
    for metadata, words in (
        ({"schema": "other"}, "not a recording"),
        ({"version": "2"}, "Upgrade"),
        ({"version": "10"}, "schema version 10"),
        ({"version": "0"}, "does not exist"),
        ({"version": "1.5"}, "does not exist"),
    ):
        before = file.read_bytes()
        rewritten(file, lambda _, m, new=metadata: m.update(new))  # type: ignore[misc]
        refused(file, words)
        file.write_bytes(before)
    save_file({"weight": np.ones(3, np.float32)}, file)
    assert not is_recording(file)
    refused(file, "not a recording", "--save-recording")


Change = Callable[[dict[str, Any], dict[str, Any]], None]

DAMAGE: dict[str, tuple[Change, str]] = {
    "no tensor": (lambda a, _: a.pop("0.bounds"), "0.bounds"),
    "a lane too few": (lambda a, _: a.update({"0.bounds": a["0.bounds"][..., 1:]}), "lanes"),
    "a block too many": (
        lambda a, _: a.update({"0.certificate": np.repeat(a["0.certificate"], 2, 3)}),
        "0.certificate",
    ),
    "another dtype": (lambda a, _: a.update({"0.bounds": a["0.bounds"].astype("f8")}), "F64"),
    "calls as floats": (lambda a, _: a.update({"0.pass": a["0.pass"].astype("f4")}), "0.pass"),
    "kept rows outside": (lambda _, y: y["layers"][0]["kept"][0].update(rows=[16, 3]), "within"),
    "kept row negative": (lambda _, y: y["layers"][0]["kept"][0].update(rows=[-1, 3]), "within"),
    "kept of another call": (lambda _, y: y["layers"][0]["kept"][0].update({"pass": 4}), "call 4"),
    "kept head": (lambda _, y: y["layers"][0]["kept"][0].update(head=1), "head 1"),
    "kept keys missing": (
        lambda a, _: a.update({"0.kept.0.key": a["0.kept.0.key"][:-1]}),
        "key is bfloat16",
    ),
    "no heads": (lambda _, y: y["layers"][0].update(heads=0), "heads"),
    "heads as text": (lambda _, y: y["layers"][0].update(heads="1"), "heads"),
    "scale": (lambda _, y: y["layers"][0].update(scale=float("nan")), "scale"),
    "dtype": (lambda _, y: y["layers"][0].update(dtype="int8"), "dtype"),
    "name": (lambda _, y: y["layers"][0].update(name=3), "name"),
    "no name": (lambda _, y: y["layers"][0].pop("name"), "name"),
    "no tolerance": (lambda _, y: y.pop("tolerance"), "tolerance"),
    "tolerance": (lambda _, y: y.update(tolerance=2.0), "tolerance"),
    "no auto": (lambda _, y: y.update(families=["ball"]), "auto"),
    "other lanes": (lambda _, y: y.update(record_fields=["n"]), "record_fields"),
    "other verdicts": (lambda _, y: y.update(certificate_fields=["gap"]), "certificate_fields"),
    "negative": (lambda _, y: y.update(passes_not_recorded=-1), "not_recorded"),
    "layers": (lambda _, y: y.update(layers=7), "damaged"),
    "verdict": (lambda a, _: a["0.certificate"].__setitem__((..., 0), 1e30), "verdict"),
    "settings": (lambda _, y: y.update(settings=[1]), "damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_files_that_contradict_themselves(file: Path, damage: str) -> None:
    """Every statement of the layout is checked. Catches a damaged file read as something else."""
    change, word = DAMAGE[damage]

    def through_layout(arrays: dict[str, Any], metadata: dict[str, str]) -> None:
        layout = json.loads(metadata["layout"])
        change(arrays, layout)
        metadata["layout"] = json.dumps(layout)

    rewritten(file, through_layout)
    refused(file, word)


def test_layout_that_is_no_json(file: Path) -> None:
    """Catches an error of the JSON parser that reaches the user."""
    for text in ("{", "[" * 100_000):
        rewritten(file, lambda _, metadata, text=text: metadata.update(layout=text))  # type: ignore[misc]
        refused(file, "damaged")
    rewritten(file, lambda _, metadata: metadata.pop("layout"))
    refused(file, "layout")


def test_names_cannot_steer_a_terminal(file: Path) -> None:
    """Catches an escape sequence of a file that reaches the terminal, or a table of many lines."""

    def rename(_: dict[str, Any], metadata: dict[str, str]) -> None:
        layout = json.loads(metadata["layout"])
        layout["layers"][0]["name"] = "a\x1b[31m\nb\u202e"
        metadata["layout"] = json.dumps(layout)

    rewritten(file, rename)
    assert read_recording(file).layers[0].name == r"a\x1b[31m\nb\u202e"


def test_file_that_vanishes(file: Path) -> None:
    """Layers are read when asked for. Catches a traceback of the reader's library."""
    recording = read_recording(file)
    file.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        recording.layers[0]
    with pytest.raises(IndexError):
        recording.layers[1]


def test_failed_write_leaves_the_old_file(file: Path) -> None:
    """Catches a file written in place, and temporary files that stay."""

    class Failing(list[LayerPasses]):
        def __iter__(self) -> Iterator[LayerPasses]:
            raise OSError("disk")

    before = file.read_bytes()
    with pytest.raises(OSError, match="disk"):
        write_recording(file, Recording(Failing(), RECORDED_BOUNDS, 2.0**-12))
    with pytest.raises(OSError):
        write_recording(file.parent / "none" / "r.safetensors", recording_of())
    lacking = layer_of([block()])
    with pytest.raises(ValueError, match="lanes"):
        write_recording(file, Recording([lacking], ("auto",), 2.0**-12))
    assert file.read_bytes() == before
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]


def test_settings_are_checked() -> None:
    """Catches a layer whose shape makes no sense, before it is written."""
    for wrong in (
        {"heads": 3, "key_heads": 2},
        {"num_keys": 2**24},
        {"block_q": 0},
        {"head_dim": True},
        {"scale": "1"},
        {"soft_cap": float("inf")},
        {"causal": 1},
        {"group": None},
    ):
        with pytest.raises(ValueError, match=next(reversed(wrong))):
            settings_of(**{"heads": 1, **wrong})  # type: ignore[arg-type]


def test_merge() -> None:
    """Hosts with other layers, and other calls of one layer. Catches calls that change places."""
    first = recording_of(
        layer_of([block(1.0)], passes=(0, 4)),
        layer_of([block(2.0)], name="other"),
        not_recorded=1,
        settings={"a": 1},
    )
    second = recording_of(
        layer_of([block(3.0)], passes=(2,)),
        layer_of([block(4.0)], num_queries=5),
        not_recorded=2,
        settings={"b": 2},
    )
    merged = merge_recordings([first, second])
    assert [(layer.name, layer.passes.tolist()) for layer in merged.layers] == [
        ("layer", [0, 2, 4]),
        ("other", [0]),
        ("layer", [0]),
    ]
    gaps = merged.layers[0].bounds[:, 0, 0, 0, 0] - merged.layers[0].bounds[:, 0, 0, 0, 1]
    assert gaps.tolist() == [1.0, 3.0, 1.0]
    assert merged.not_recorded == 3 and merged.settings == {"a": 1, "b": 2}


def test_merges_that_are_refused() -> None:
    """Catches the same call counted twice, and verdicts of two tolerances mixed."""
    one = recording_of(layer_of([block()]))
    with pytest.raises(ValueError, match="same call"):
        merge_recordings([one, one])
    with pytest.raises(ValueError, match="tolerance"):
        merge_recordings([one, recording_of(layer_of([block()], passes=(1,)), tolerance=0.01)])
    with pytest.raises(ValueError, match="none"):
        merge_recordings([])
