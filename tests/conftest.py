"""What all tests share: the devices of this machine."""

from __future__ import annotations

import os

import pytest
import torch

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() and os.environ.get("TINYVLLM_TEST_DEVICE") != "cpu" else ["cpu"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with a `device` argument runs once on each device that is here."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", DEVICES)


@pytest.fixture
def on_each_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `program.generate` compute on the device."""
    monkeypatch.setattr("program.DEVICE", device)


@pytest.fixture(scope="session", autouse=True)
def _extension() -> None:
    import tinyvllm_cli.reference  # noqa: F401

    if "cuda" in DEVICES:
        from cuda_ext.build import load_extension

        load_extension()
