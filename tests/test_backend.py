import subprocess
import sys

import pytest

from mtplx.backend import (
    BLAS,
    available_memory_bytes,
    compute_description,
    prepare_blas,
    resolve_device,
)
from mtplx.errors import ConfigError


class FakeLoader:
    """A process in which some libraries exist; the first one loaded provides sgemm."""

    def __init__(self, existing=(), provider=None):
        self.existing = existing
        self.provider = provider
        self.loaded = []

    def load(self, path):
        if path not in self.existing:
            raise OSError(f"{path}: no such file")
        self.loaded.append(path)
        self.provider = self.provider or f"/lib/{path}"

    def find(self):
        return self.provider


def prepared(
    loader, *, platform="linux", mlx_loaded=False, candidates=("openblas.1", "openblas.2")
):
    return prepare_blas(
        platform=platform,
        mlx_loaded=mlx_loaded,
        candidates=candidates,
        load=loader.load,
        find=loader.find,
    )


def test_the_first_library_that_loads_is_used_and_named():
    loader = FakeLoader(existing=["openblas.2"])
    info = prepared(loader)
    assert loader.loaded == ["openblas.2"]
    assert info.description == "OpenBLAS (/lib/openblas.2)"
    assert info.warning is None


def test_nothing_is_loaded_where_openblas_is_there_already():
    loader = FakeLoader(existing=["openblas.1"], provider="/opt/libopenblas.so")
    assert prepared(loader, mlx_loaded=True).description == "OpenBLAS (/opt/libopenblas.so)"
    assert loader.loaded == []


def test_nothing_is_loaded_on_macos():
    loader = FakeLoader(existing=["openblas.1"])
    info = prepared(loader, platform="darwin")
    assert (info.description, info.warning, loader.loaded) == ("Accelerate", None, [])


def test_no_library_warns_with_the_price_the_reasons_and_the_way_out():
    warning = prepared(FakeLoader()).warning
    for part in (
        "80 times slower",
        "openblas.1: no such file",
        "pip install cmeel-openblas",
    ):
        assert part in warning


def test_mlx_imported_first_warns_and_loads_nothing():
    loader = FakeLoader(existing=["openblas.1"])
    info = prepared(loader, mlx_loaded=True)
    assert loader.loaded == []
    assert "before mtplx" in info.warning
    assert "80 times slower" in info.warning


FRESH_PROCESS = """
import sys
import mtplx.backend
assert "mlx.core" not in sys.modules, "importing the backend must not import MLX"
import mlx.core as mx
a = mx.ones((8, 8))
assert (a @ a)[0, 0].item() == 8
maps = open("/proc/self/maps").read()
assert "openblas" in maps
print(mtplx.backend.BLAS.warning, mtplx.backend.global_sgemm_library())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs OpenBLAS")
def test_mlx_binds_to_openblas_in_a_fresh_process():
    done = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    warning, library = done.stdout.split()
    assert warning == "None"
    assert "openblas" in library


LATE_IMPORT = """
import logging
logging.basicConfig(format="%(levelname)s %(message)s")
import mlx.core
import mtplx.backend
mtplx.backend.use_device("cpu")
mtplx.backend.use_device("cpu")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs OpenBLAS")
def test_a_late_import_warns_once_when_the_cpu_is_used():
    done = subprocess.run(
        [sys.executable, "-c", LATE_IMPORT], capture_output=True, text=True, check=True
    )
    assert done.stderr.count("WARNING mlx was imported before mtplx") == 1


def test_auto_takes_the_gpu_where_there_is_one():
    assert resolve_device("auto", has_gpu=True) == "gpu"
    assert resolve_device("auto", has_gpu=False) == "cpu"
    assert resolve_device("cpu", has_gpu=True) == "cpu"
    assert resolve_device("gpu", has_gpu=True) == "gpu"


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="no GPU"):
        resolve_device("gpu", has_gpu=False)


def test_what_computes_is_named():
    assert compute_description("cpu") == BLAS.description
    assert "GPU" in compute_description("gpu")


def test_available_memory_is_positive():
    assert available_memory_bytes() > 0
