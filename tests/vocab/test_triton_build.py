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

from parallel_rl.vocab.backends.choice import CUTS, PER_TOP, tiling  # noqa: E402
from parallel_rl.vocab.backends.triton import kernels, operators  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
RELEASE = tuple(int(part) for part in triton.__version__.split(".")[:2])
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
WIDE = {"stats": 8, "gradient": 4}  # loads of 128 bits of a thread: in the loop, and as many in the tail
SLOW = pytest.mark.slow  # `make test-triton` builds all of them, `make test` each kernel once
ARCHITECTURES = [90, pytest.param(100, marks=SLOW)]
#: what is reached on Hopper, of (pass, with entropy): instructions for a logit of 16 bits and of 32
MOST = {
    ("stats", True): (10.5, 10.5),
    ("stats", False): (9, 8.5),
    ("gradient", True): (12, 10.25),
    ("gradient", False): (10, 8.25),
}
#: warps meet for the maximum and for all sums, with one barrier between; before Triton 3.8 a meeting takes two
BARRIERS = {"stats": 3 if RELEASE >= (3, 8) else 5, "gradient": 0}


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
    "logprobs": "*fp32", "entropies": "*fp32", "lses": "*fp32", "sums": "*fp32", "half": "*fp16", "tops": "*fp32",
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
    half: bool = False,
    within: bool = False,
) -> Any:
    """As it is built at a launch on a contiguous shard [8192, width] with `valid` real columns; `out` if it is not `dtype`.

    Args:
        half: of logits that are stored in half the bytes as well, or lie so.
        within: of a wider row, so that the first column lies anywhere.
    """
    valid = width if valid is None else valid
    tile = tiling(8192, width, dtype.itemsize, 132, CUTS[name, (9, 0)])
    constants: dict[str, Any] = {
        "column_stride": 1, "LANES": tile.lanes, "PER_LANE": tile.per_lane, "ENTROPY": entropy,
        "ALIGNED_ROWS": tile.aligns(width) and not within, "ALIGNED_ENDS": tile.aligns(valid, width),
        "PER_TOP": PER_TOP if half else 0,
    }  # fmt: skip
    if not half:
        constants |= {"tops": None} | ({"half": None} if name == "stats" else {})
    types = {**POINTERS, "logits": f"*{TYPES[dtype]}", "out": f"*{TYPES[out or dtype]}"}
    if name == "stats":
        constants["SQUARES"] = squares
    if name == "gradient":
        constants |= {"out_column_stride": 1, "SAVED": 2 + entropy, "LOGPROB": True, "LSE": True}
        if not entropy:
            constants["g_entropies"] = None
    kernel = getattr(kernels, f"{name}_kernel")
    numbers = dict.fromkeys(("row_stride", "out_row_stride", "half_stride", "width"), width) | {"valid": valid}
    aligned = {*POINTERS, "logits", "out", "columns_per_program"} | {n for n, x in numbers.items() if x % 16 == 0}
    anywhere = {*constants, "logits", "out"} if within else set(constants)
    return build(kernel, architecture, tile.warps, aligned - anywhere, constants, types)


def usage(kernel: Any, tmp_path: Path) -> tuple[int, int]:
    """(registers, bytes of local memory: spills) of the built kernel."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    told = subprocess.run([TOOLS / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", told)
    assert found is not None, told
    return int(found[1]), int(found[2]) + int(found[3])


def machine_code(kernel: Any, tmp_path: Path) -> list[tuple[int, str]]:
    """(address, instruction) of the built kernel."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    told = subprocess.run([TOOLS / "cuobjdump", "-sass", cubin], capture_output=True, text=True, check=True).stdout
    return [(int(at, 16), what) for at, what in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", told)]


def wide_loop(code: list[tuple[int, str]], load: str = "LDG.E.128") -> list[str]:
    """The first loop with such loads, of 128 bits at once: that over the whole tiles of a row."""
    for at, what in code:
        back = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", what)
        if back and int(back[1], 16) < at:
            body = [other for where, other in code if int(back[1], 16) <= where <= at]
            if any(load in other for other in body):
                return body
    raise AssertionError(f"no loop with {load}")


def accesses(kernel: Any) -> tuple[list[str], list[str]]:
    """Global loads and stores in the order of the PTX, which is that of the program."""
    text = kernel.asm["ptx"]
    return re.findall(r"\bld\.global\S*", text), re.findall(r"\bst\.global\S*", text)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.getbasetemp()  # of this run: builds are really made, once for all of its processes
    monkeypatch.setenv(
        "TRITON_CACHE_DIR", str((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "triton")
    )


@pytest.mark.parametrize(
    ("dtype", "architecture", "entropy"),
    [
        (torch.bfloat16, 90, True),
        pytest.param(torch.float32, 90, False, marks=SLOW),
        pytest.param(torch.float16, 90, True, marks=SLOW),
        pytest.param(torch.bfloat16, 100, False, marks=SLOW),
        pytest.param(torch.float32, 100, True, marks=SLOW),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["stats", "gradient"])
def test_passes(name: str, architecture: int, dtype: torch.dtype, entropy: bool, tmp_path: Path) -> None:
    kernel = build_pass(name, dtype, architecture, entropy)
    registers, spilled = usage(kernel, tmp_path)
    assert spilled == 0
    loads, stores = accesses(kernel)
    # as many in the tail as in the loop; each of the others is one number per row
    assert sum(load.endswith("v4.b32") for load in loads) == WIDE[name] and not any(".v2" in load for load in loads)
    threads = 32 * CUTS[name, (9, 0)].warps
    at_once = 65536 // (-(-registers // 8) * 8 * threads)
    assert threads * WIDE[name] // 2 * 16 == 8 << 10  # bytes in flight of a program; some 28 KiB of all hide the delay
    # the compilers between, the last for Python 3.10 among them, give the gradient 64 registers
    least = {"stats": 10 if architecture == 90 else 9, "gradient": 4 if (3, 6) < RELEASE < (3, 9) else 5}
    assert at_once >= least[name]
    if name == "gradient":
        assert [store for store in stores if not store.endswith("v4.b32")] == [] and len(stores) == 4
    # lanes meet at the end of the row only, and nothing is atomic
    assert not re.search(r"\b(atom|red)\.", kernel.asm["ptx"])


@SLOW
@pytest.mark.parametrize(
    ("width", "dtype", "entropy"),
    [
        (16032, torch.bfloat16, True),  # rows start at 16 columns, as those of 128256: the same code
        (16032, torch.bfloat16, False),
        (151936 // 16, torch.bfloat16, True),  # ... at 8
        (16032, torch.float32, True),
        (16032, torch.float32, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["stats", "gradient"])
def test_instructions_of_the_loop(name: str, dtype: torch.dtype, width: int, entropy: bool, tmp_path: Path) -> None:
    """What a multiprocessor issues for an element bounds the pass with the entropy: at 11, two thirds of it.

    One operation more in the loop is seen by no other test without a card.
    """
    code = machine_code(build_pass(name, dtype, 90, entropy, width), tmp_path)
    loop = wide_loop(code)
    elements = sum("LDG.E.128" in what for what in loop) * 16 // dtype.itemsize
    assert len(loop) / elements <= MOST[name, entropy][dtype.itemsize // 4]
    assert not any("BAR." in what for what in loop)
    assert sum("BAR.SYNC" in what for _, what in code) <= BARRIERS[name]
    # the target's logit is on its way before the first tile comes
    narrow = [number for number, (_, what) in enumerate(code) if "LDG.E" in what and ".128" not in what]
    first = next(number for number, (_, what) in enumerate(code) if "LDG.E.128" in what)
    assert sum(number < first for number in narrow) >= 4


@SLOW
@pytest.mark.parametrize(("architecture", "dtype"), [(90, torch.bfloat16), (100, torch.float32)], ids=str)
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
    assert sum(load.endswith("v4.b32") for load in loads) == WIDE[name] and not any(".v2" in load for load in loads)
    assert [store for store in stores if not store.endswith("v4.b32")] == [] or name == "stats"


@SLOW
@pytest.mark.parametrize(("architecture", "dtype"), [(90, torch.float16), (100, torch.float32)], ids=str)
def test_a_gradient_in_the_dtype_of_the_products(architecture: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of a head's float32 logits, and of those that it kept: read wide, and written as wide as the narrower numbers are."""
    kernel = build_pass("gradient", dtype, architecture, True, out=torch.bfloat16)
    assert usage(kernel, tmp_path)[1] == 0
    loads, stores = accesses(kernel)
    assert sum(load.endswith("v4.b32") for load in loads) == 4
    assert {store.rsplit(".", 2)[1] for store in stores} == {"v2" if dtype == torch.float32 else "v4"}


@SLOW
@pytest.mark.parametrize(("architecture", "width"), [(90, 131072), (90, 18992), (100, 18992)])
def test_logits_are_kept_in_the_pass_of_the_statistics(architecture: int, width: int, tmp_path: Path) -> None:
    """The largest of a block is found within a warp: a barrier for each tile would stop the loads, and so would spills."""
    kernel = build_pass("stats", torch.float32, architecture, True, width, half=True)
    assert usage(kernel, tmp_path)[1] == 0
    loop = wide_loop(machine_code(kernel, tmp_path)) if architecture == 90 else []
    elements = sum("LDG.E.128" in what for what in loop) * 4
    assert len(loop) <= 18 * elements, "6 bytes move for an element: 18 instructions are 37 % of what can be issued"
    assert not any("BAR." in what or "LDS" in what or "STS" in what for what in loop)
    assert sum("STG.E.64" in what for what in loop) * 4 == elements
    assert sum("STG.E " in what for what in loop) * 4 <= elements, "a top for each block"


@SLOW
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_gradient_of_kept_logits(architecture: int, tmp_path: Path) -> None:
    kernel = build_pass("gradient", torch.float16, architecture, True, out=torch.bfloat16, half=True)
    assert usage(kernel, tmp_path)[1] == 0
    loop = wide_loop(machine_code(kernel, tmp_path)) if architecture == 90 else []
    elements = sum("LDG.E.128" in what for what in loop) * 8
    assert len(loop) <= 12.5 * elements and not any("BAR." in what for what in loop)
    loads, stores = accesses(kernel)
    assert sum(load.endswith("v4.b32") for load in loads) == 4
    assert all(store.endswith("v4.b32") for store in stores) and len(stores) == 4


@SLOW
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_gradient_is_scaled_wide(architecture: int, tmp_path: Path) -> None:
    from parallel_rl.vocab.backends.triton import operators as scale

    types = {"values": "*bf16", "factor": "*fp32"}
    built = build(
        scale.scale_kernel, architecture, scale._WARPS, {"values", "factor", "width"}, {"BLOCK": scale._BLOCK}, types
    )
    assert usage(built, tmp_path)[1] == 0
    loads, stores = accesses(built)
    assert sum(".v4.b32" in load for load in loads) == len(loads) - 1 and all(".v4.b32" in store for store in stores)


@SLOW
@pytest.mark.parametrize("name", ["stats", "gradient"])
def test_a_vocabulary_of_any_size_is_read_wide_but_for_its_tail(name: str, tmp_path: Path) -> None:
    kernel = build_pass(name, torch.bfloat16, 90, True, valid=128256 - 3)
    assert usage(kernel, tmp_path)[1] == 0
    loads, _ = accesses(kernel)
    assert sum(load.endswith("v4.b32") for load in loads) == WIDE[name] // 2  # the loop's
    assert sum(load.endswith("b16") for load in loads) - 4 * WIDE[name] in (0, 1)  # the tail's, and the target's logit


@SLOW
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_squared_probabilities_are_summed_in_the_same_registers(architecture: int, tmp_path: Path) -> None:
    kernel = build_pass("stats", torch.bfloat16, architecture, True, squares=True)
    assert usage(kernel, tmp_path)[1] == 0


@pytest.mark.parametrize(
    ("architecture", "entropy", "squares"),
    [(90, True, True), pytest.param(100, True, False, marks=SLOW), pytest.param(90, False, False, marks=SLOW)],
)
@pytest.mark.parametrize("name", ["merge", "combine"])
def test_combinations(name: str, architecture: int, entropy: bool, squares: bool, tmp_path: Path) -> None:
    kernel = getattr(kernels, f"{name}_kernel")
    constants = {"ENTROPY": entropy, "SQUARES": squares, "BLOCK": operators._TOKENS}
    built = build(kernel, architecture, 4, set(POINTERS), constants, POINTERS)
    assert usage(built, tmp_path)[1] == 0
    labels = re.findall(r"^(\$L\S+):", built.asm["ptx"], re.MULTILINE)
    after = {at: built.asm["ptx"].split(f"{at}:")[1] for at in labels}
    loops = [
        text[: end.start()] for at, text in after.items() if (end := re.search(rf"bra\S*\s+{re.escape(at)};", text))
    ]
    assert [text.count("ld.global") for text in loops] == [8, 8 * (3 + entropy + squares)], (
        "eight parts are read at once"
    )
    assert "lg2.approx" not in built.asm["ptx"], "the logarithm near 1 would lose its digits"


def test_every_kernel_is_built_above() -> None:
    names = {name.removesuffix("_kernel") for name in vars(kernels) if name.endswith("_kernel")}
    assert names == {"stats", "gradient", "merge", "combine"}
