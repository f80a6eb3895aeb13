"""Files that want to run something: nothing runs, and the refusal is one sentence."""

from __future__ import annotations

import argparse
import builtins
import functools
import io
import operator
import os
import pickle
import subprocess
import tarfile
import zipfile

import pytest
from convert_helpers import pickled, small_checkpoint, small_state, write_pth, zip_around

from marjax import torch_files

pytestmark = pytest.mark.torch

MARKER = "executed"


class Call:
    """Unpickles as whatever calling `function` gives."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


class Build:
    """Unpickles as a Namespace whose state comes from a call."""

    def __reduce__(self):
        return argparse.Namespace, (), {"x": Call(os.system, f"touch {MARKER}")}


def opcodes(*parts: str) -> bytes:
    return "".join(parts).encode()


def getattr_chain() -> bytes:
    """getattr(__import__("os"), "system")("touch ..."), which no object pickles to by itself."""
    return opcodes("c__builtin__\ngetattr\n(c__builtin__\n__import__\n(Vos\ntRVsystem\ntR", "(Vtouch ", MARKER, "\ntR.")


def dotted_name() -> bytes:
    """A name that walks from an allowed module to os.system."""
    name = b"_os.system"
    return (
        b"\x80\x04\x8c\x08argparse\x8c" + bytes([len(name)]) + name + b"\x93"
        b"\x8c" + bytes([6 + len(MARKER)]) + f"touch {MARKER}".encode() + b"\x85R."
    )


# Every payload makes the marker file when Python's own unpickler gets it.
PAYLOADS = {
    "os.system": lambda: pickled(Call(os.system, f"touch {MARKER}")),
    "subprocess": lambda: pickled(Call(subprocess.check_call, ["touch", MARKER])),
    "eval": lambda: pickled(Call(builtins.eval, f"open({MARKER!r}, 'w').close()")),
    "exec": lambda: pickled(Call(builtins.exec, f"import os; os.mknod({MARKER!r})")),
    "os.open": lambda: pickled(Call(os.open, MARKER, os.O_CREAT)),
    "getattr chain": getattr_chain,
    "partial": lambda: pickled(Call(operator.call, functools.partial(os.mknod, MARKER))),
    "nested reduce": lambda: pickled({"model": [({"a": Call(os.system, f"touch {MARKER}")},)]}),
    "in a Namespace": lambda: pickled({"args": argparse.Namespace(x=[Call(os.system, f"touch {MARKER}")])}),
    "in the state of a Namespace": lambda: pickled({"args": Build()}),
    "as a key": lambda: pickled([Call(os.system, f"touch {MARKER}")]),
    "protocol 0": lambda: opcodes("cos\nsystem\n(Vtouch ", MARKER, "\ntR."),
    "INST": lambda: opcodes("(Vtouch ", MARKER, "\nios\nsystem\n."),
    "OBJ": lambda: opcodes("(cos\nsystem\nVtouch ", MARKER, "\no."),
    "protocol 4": lambda: pickled(Call(os.system, f"touch {MARKER}"), protocol=4),
    "protocol 5": lambda: pickled({"w": Call(os.system, f"touch {MARKER}")}, protocol=5),
    "dotted name": dotted_name,
}


def run_by_python(data: bytes) -> bool:
    """Whether Python's own unpickler runs the payload. Clears the marker."""
    try:
        pickle.loads(data)
    finally:
        done = os.path.exists(MARKER)
        if done:
            os.remove(MARKER)
    return done


@pytest.mark.parametrize("name", PAYLOADS)
def test_payloads(refused, tmp_path, name):
    data = PAYLOADS[name]()
    assert run_by_python(data), "the payload must be able to do harm"
    (tmp_path / "bare.pth").write_bytes(data)
    zip_around(tmp_path / "zip.pth", data)
    zip_around(tmp_path / "zip.safetensors", data)
    for file in ("bare.pth", "zip.pth", "zip.safetensors"):
        message = refused(file, "out")
        assert f"Cannot read '{file}': it {'is neither' if file == 'bare.pth' else 'refers to '}" in message
        assert not os.path.exists(MARKER)
    refused("zip.pth", "out", "--weights", "model")
    refused("zip.pth", "out", "--vae", "zip.pth")
    assert not os.path.exists(MARKER)


@pytest.mark.parametrize("name", PAYLOADS)
def test_without_our_own_look_safe_mode_stands(tmp_path, monkeypatch, name):
    monkeypatch.setattr(torch_files, "_check_archive", lambda path: None)
    with pytest.raises(ValueError, match=r"Cannot read .*: (torch cannot read it safely|it holds a)") as caught:
        torch_files.read(zip_around(tmp_path / "zip.pth", PAYLOADS[name]()))
    assert not os.path.exists(MARKER) and "weights_only" not in str(caught.value)


@pytest.mark.parametrize("where", ["args", "optimizer", "model", "epoch"])
def test_hidden_in_a_real_checkpoint(refused, tmp_path, where):
    """In an entry that is not even used."""
    content = small_checkpoint()
    content[where] = Call(os.system, f"touch {MARKER}")
    write_pth(tmp_path / "last.pth", content)
    message = refused("last.pth", "out", "--num-heads", "1")
    assert "it refers to posix.system, where only tensors, plain containers and argparse.Namespace are read" in message
    assert not os.path.exists(MARKER)


def test_hidden_in_another_record(refused, tmp_path):
    """Whatever record torch takes for the pickle, all of them are looked at."""
    write_pth(tmp_path / "last.pth", small_checkpoint())
    with zipfile.ZipFile(tmp_path / "last.pth", "a") as archive:
        archive.writestr("other/data.pkl", PAYLOADS["os.system"]())
    assert "it refers to posix.system" in refused("last.pth", "out", "--num-heads", "1")
    assert not os.path.exists(MARKER)


def test_old_formats(refused, tmp_path):
    import torch

    content = {"model": {"w": torch.zeros(2)}, "args": Call(os.system, f"touch {MARKER}")}
    torch.save(content, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert "neither a safetensors file nor a zip archive" in refused("old.pth", "out")
    with tarfile.open(tmp_path / "tar.pth", "w") as archive:
        data = PAYLOADS["os.system"]()
        member = tarfile.TarInfo("pickle")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    assert "neither a safetensors file nor a zip archive" in refused("tar.pth", "out")
    assert not os.path.exists(MARKER)


@pytest.mark.parametrize(
    "call",
    [
        lambda torch: Call(torch.load, MARKER),
        lambda torch: Call(torch.jit.load, MARKER),
        lambda torch: Call(torch.hub.load, MARKER, "x"),
        lambda torch: Call(bytearray, 10**13),  # no code, but all the memory there is
        lambda torch: Call(torch.device, "cuda"),
        lambda torch: Call(torch.nn.Linear, 3, 3),
    ],
)
def test_functions_that_weights_never_need(refused, tmp_path, call):
    import torch

    zip_around(tmp_path / "a.pth", pickled({"model": call(torch)}))
    assert "it refers to " in refused("a.pth", "out")


def test_what_the_reference_stores_is_still_read(tmp_path):
    """The refusals above are not those of a reader that refuses everything."""
    file = torch_files.read(write_pth(tmp_path / "last.pth", small_checkpoint()))
    assert file.state.keys() == small_state().keys()
