"""Every kernel, built for Hopper and Blackwell without a card: no spills, loads and stores of 128 bits where it matters."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if sys.platform != "linux" or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the compiler runs on Linux, and not under the interpreter", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from parallel_rl.vocab.backends.triton import kernels, operators  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
ARCHITECTURES = [90, pytest.param(100, marks=pytest.mark.slow)]


def build(kernel: Any, architecture: int, warps: int, of_16: set[str], constants: dict[str, Any], types: dict) -> Any:
    """The kernel for one signature; the arguments in `of_16` are multiples of 16, as Triton finds out at a launch."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in of_16 & set(names)},
    )
    options = {"num_warps": warps, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


POINTERS = {
    "targets": "*i64", "keep": "*i1", "inv_t": "*fp32", "parts": "*fp32", "merged": "*fp32", "rows": "*fp32",
    "logprobs": "*fp32", "entropies": "*fp32", "lses": "*fp32", "sums": "*fp32",
    "g_logprobs": "*fp32", "g_entropies": "*fp32", "g_lses": "*fp32",
}  # fmt: skip


def build_pass(
    name: str,
    dtype: torch.dtype,
    architecture: int,
    entropy: bool,
    width: int = 128256,
    valid: int | None = None,
    out: torch.dtype | None = None,
    squares: bool = False,
) -> Any:
    """As it is built at a launch on a contiguous shard [8192, width] with `valid` real columns; `out` if it is not `dtype`."""
    valid = width if valid is None else valid
    tile = operators.tiling(8192, width, dtype.itemsize, 132)
    constants: dict[str, Any] = {
        "column_stride": 1, "LANES": tile.lanes, "PER_LANE": tile.per_lane, "ENTROPY": entropy,
        "ALIGNED_ROWS": tile.aligns(width), "ALIGNED_ENDS": tile.aligns(valid, width),
    }  # fmt: skip
    types = {**POINTERS, "logits": f"*{TYPES[dtype]}", "out": f"*{TYPES[out or dtype]}"}
    if name == "stats":
        constants["SQUARES"] = squares
    if name == "gradient":
        constants |= {"out_column_stride": 1, "SAVED": 2 + entropy, "LOGPROB": True, "LSE": True}
        if not entropy:
            constants["g_entropies"] = None
    kernel = getattr(kernels, f"{name}_kernel")
    numbers = {"row_stride": width, "out_row_stride": width, "width": width, "valid": valid}
    aligned = {*POINTERS, "logits", "out", "columns_per_program"} | {n for n, x in numbers.items() if x % 16 == 0}
    return build(kernel, architecture, operators._warps(tile), aligned - set(constants), constants, types)


def usage(kernel: Any, tmp_path: Path) -> tuple[int, int]:
    """(registers, bytes of local memory: spills) of the built kernel."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    told = subprocess.run([TOOLS / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", told)
    assert found is not None, told
    return int(found[1]), int(found[2]) + int(found[3])


def accesses(kernel: Any) -> tuple[list[str], list[str]]:
    """Global loads and stores in the order of the PTX, which is that of the program."""
    text = kernel.asm["ptx"]
    return re.findall(r"\bld\.global\S*", text), re.findall(r"\bst\.global\S*", text)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))  # builds are really made


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ["stats", "gradient"])
def test_passes(name: str, architecture: int, dtype: torch.dtype, entropy: bool, tmp_path: Path) -> None:
    kernel = build_pass(name, dtype, architecture, entropy)
    registers, spilled = usage(kernel, tmp_path)
    assert spilled == 0
    assert registers <= 48  # 5 programs of 256 threads on a multiprocessor, enough loads in flight
    loads, stores = accesses(kernel)
    wide = [load for load in loads if load.endswith("v4.b32")]
    # two a thread in the loop, two in the tail; each of the others is one number a row
    assert len(wide) == 4 and not any(".v2" in load for load in loads)
    if name == "gradient":
        assert [store for store in stores if not store.endswith("v4.b32")] == [] and len(stores) == 4
    # no barrier in the loop: lanes meet at the end of the row only, and nothing is atomic
    assert not re.search(r"\b(atom|red)\.", kernel.asm["ptx"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ["stats", "gradient"])
def test_a_shard_of_whole_lanes_is_read_and_written_wide(
    name: str, architecture: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """8 times an odd number, as of 151936 words on 16 ranks: rows start at 16 bytes, though not at 16 columns."""
    width = 151936 // 16
    assert width % 16 == 8
    kernel = build_pass(name, dtype, architecture, True, width)
    assert usage(kernel, tmp_path)[1] == 0
    loads, stores = accesses(kernel)
    assert sum(load.endswith("v4.b32") for load in loads) == 4 and not any(".v2" in load for load in loads)
    assert [store for store in stores if not store.endswith("v4.b32")] == [] or name == "stats"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_gradient_in_the_dtype_of_the_products(architecture: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of a head's float32 logits, and of those that it kept: read wide, and written as wide as the narrower numbers are."""
    kernel = build_pass("gradient", dtype, architecture, True, out=torch.bfloat16)
    assert usage(kernel, tmp_path)[1] == 0
    loads, stores = accesses(kernel)
    assert sum(load.endswith("v4.b32") for load in loads) == 4
    assert {store.rsplit(".", 2)[1] for store in stores} == {"v2" if dtype == torch.float32 else "v4"}


@pytest.mark.parametrize("name", ["stats", "gradient"])
def test_a_vocabulary_of_any_size_is_read_wide_but_for_its_tail(name: str, tmp_path: Path) -> None:
    kernel = build_pass(name, torch.bfloat16, 90, True, valid=128256 - 3)
    assert usage(kernel, tmp_path)[1] == 0
    loads, _ = accesses(kernel)
    assert sum(load.endswith("v4.b32") for load in loads) == 2  # the loop's
    assert sum(load.endswith("b16") for load in loads) in (16, 17)  # the tail's, and the target's logit


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_squared_probabilities_are_summed_in_the_same_registers(architecture: int, tmp_path: Path) -> None:
    kernel = build_pass("stats", torch.bfloat16, architecture, True, squares=True)
    assert usage(kernel, tmp_path)[1] == 0


@pytest.mark.parametrize(("entropy", "squares"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ["merge", "combine"])
def test_combinations(name: str, architecture: int, entropy: bool, squares: bool, tmp_path: Path) -> None:
    kernel = getattr(kernels, f"{name}_kernel")
    constants = {"ENTROPY": entropy, "SQUARES": squares, "BLOCK": operators._TOKENS} | (
        {"COUNT": 8} if name == "combine" else {}
    )
    built = build(kernel, architecture, 4, set(POINTERS), constants, POINTERS)
    assert usage(built, tmp_path)[1] == 0
    labels = re.findall(r"^(\$L\S+):", built.asm["ptx"], re.MULTILINE)
    back = [at for at in labels if re.search(rf"bra\S*\s+{re.escape(at)};", built.asm["ptx"].split(f"{at}:")[1])]
    assert bool(back) == (name == "merge"), "eight shards are read at once, without a loop"
    assert "lg2.approx" not in built.asm["ptx"], "the logarithm near 1 would lose its digits"


def test_every_kernel_is_built_above() -> None:
    names = {name.removesuffix("_kernel") for name in vars(kernels) if name.endswith("_kernel")}
    assert names == {"stats", "gradient", "merge", "combine"}
