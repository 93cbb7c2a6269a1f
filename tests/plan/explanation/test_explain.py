"""Decisions read from compiled programs, memory that is freed, and `--explain` as it is typed."""

from __future__ import annotations

import io
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from plan_runs import small
from rich.console import Console

from dsjax import aot
from dsjax.aot.hlo import parse
from dsjax.cli import main
from dsjax.errors import ConfigError
from dsjax.mesh import make_mesh
from dsjax.plan import Explanation, explain
from dsjax.plan.compiled import describe
from dsjax.plan.explanation.explain import _take_apart, explain_run
from dsjax.plan.explanation.fused import Compiled
from dsjax.plan.explanation.fusion import candidates
from dsjax.plan.explanation.jaxpr import walk
from dsjax.plan.explanation.judged import FusedKernel, judge
from dsjax.plan.explanation.kept import kept
from dsjax.plan.explanation.show import explain_notes, explain_sheets, show_explanation

H100 = aot.load_chips()["H100"]


def relu(params, x):
    return jax.nn.relu(x @ params["w"] + params["b"])


def on(target, *shapes, mesh=None, specs=None, dtype=jnp.bfloat16):
    """Abstract arrays on a target."""
    mesh = make_mesh(mesh or {"fsdp": -1}, target.devices())
    specs = specs or [P()] * len(shapes)
    return [
        jax.ShapeDtypeStruct(s, dtype, sharding=NamedSharding(mesh, p))
        for s, p in zip(shapes, specs, strict=True)
    ]


def params_and_x(target, x=(4096, 512), w=(512, 512), b=(512,)):
    w, b, x = on(target, w, b, x)
    return {"w": w, "b": b}, x


# ---- phase two: what the compiler does -------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({}, "Triton fusion of the product"),
        (
            {"xla_gpu_enable_triton_gemm": False},
            "library call __cublas$lt$matmul with the epilogue BIAS_RELU",
        ),
    ],
)
def test_an_epilogue_that_xla_fuses_is_left_to_it(gpu_compiler, options, kernel):
    target = aot.parse_target("1xH100")
    found = explain(jax.jit(relu), params_and_x(target), target, options=options)
    (one,) = found.candidates
    assert (one.by, one.taken, one.followed_by) == ("xla", True, ("bias", "activation"))
    assert kernel in one.decision and found.compiled and found.compiled_flops == found.product_flops


def test_a_convolution_is_read_from_cudnns_call(gpu_compiler):
    def conv(params, x):
        dimensions = ("NHWC", "HWIO", "NHWC")
        made = jax.lax.conv_general_dilated(x, params["w"], (1, 1), "SAME", dimension_numbers=dimensions)
        return jax.nn.relu(made + params["b"])

    target = aot.parse_target("1xH100")
    args = params_and_x(target, (8, 32, 32, 64), (3, 3, 64, 64), (64,))
    (one,) = explain(jax.jit(conv), args, target).candidates
    assert one.by == "xla" and "__cudnn$convBiasActivationForward" in one.decision


def test_a_norm_behind_a_product_is_not_fused(gpu_compiler):
    def block(params, x):
        y = x @ params["w"] + x
        wide = y.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True))).astype(x.dtype), y

    target = aot.parse_target("1xH100")
    (one,) = explain(jax.jit(block), params_and_x(target), target).candidates
    assert one.followed_by == ("add", "cast", "norm") and one.by == "open"
    assert (
        "1 of 4 operations in the Triton fusion" in one.decision and "one other kernel reads" in one.decision
    )


def test_a_collective_between_is_told(gpu_compiler):
    target = aot.parse_target("8xH100")
    x, w, r = on(
        target, (4096, 4096), (4096, 512), (4096, 512),
        mesh={"tensor": 8}, specs=[P(None, "tensor"), P("tensor"), P()],
    )  # fmt: skip
    (one,) = explain(jax.jit(lambda x, w, r: jax.nn.relu(x @ w + r)), (x, w, r), target).candidates
    assert one.by == "blocked" and "all-reduce" in one.decision


def test_a_kernel_of_ours_comes_before_the_compiler():
    w, b, x = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, 512), (512,), (4096, 512)))
    step = walk(jax.make_jaxpr(relu)({"w": w, "b": b}, x), 1)
    found = candidates(step, H100)
    ours = FusedKernel("matmul_bias_relu", ("bias", "activation"), frozenset({"H100"}), frozenset({"bf16"}))
    (one,) = judge(found, H100, None, [ours])
    assert (one.by, one.decision) == ("kernel", "taken: kernel matmul_bias_relu")
    for other in (
        FusedKernel("other chip", ours.followed_by, frozenset({"A100-80"}), ours.dtypes),
        FusedKernel("other type", ours.followed_by, ours.chips, frozenset({"f8e4m3fn"})),
        FusedKernel("other chain", ("bias",), ours.chips, ours.dtypes),
    ):
        assert [j.by for j in judge(found, H100, None, [other])] == ["unread"]


DOT = 'dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="f/dsjaxop0/dot"}'
HLO = """HloModule m, is_scheduled=true

%inside (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {{
  %a = f32[8,8]{{1,0}} parameter(0)
  %b = f32[8,8]{{1,0}} parameter(1)
  %dot = f32[8,8]{{1,0}} {dot}
  ROOT %r = f32[8,8]{{1,0}} {first}
}}

%after (c: f32[8,8]) -> f32[8,8] {{
  %c = f32[8,8]{{1,0}} parameter(0)
  ROOT %q = f32[8,8]{{1,0}} {second}
}}

ENTRY %main (x: f32[8,8], y: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  %y = f32[8,8]{{1,0}} parameter(1)
  %f = f32[8,8]{{1,0}} fusion(%x, %y), kind=kOutput, calls=%inside
  ROOT %g = f32[8,8]{{1,0}} fusion(%f), kind=kLoop, calls=%after
}}
"""
SINE, COSINE = (
    '{op}(%{of}), metadata={{op_name="f/dsjaxop1/sin"}}',
    '{op}(%{of}), metadata={{op_name="f/dsjaxop2/cos"}}',
)


@pytest.mark.parametrize(
    ("first", "second", "state", "inside"),
    [
        (SINE, COSINE, "partly", 1),
        ("copy(%dot)", SINE, "apart", 0),
        ("copy(%dot)", "copy(%c)", "removed", 0),
        (SINE, "copy(%c)", "fused", 1),
    ],
)
def test_readings_of_programs_by_hand(first, second, state, inside):
    step = walk(jax.make_jaxpr(lambda x, y: jnp.cos(jnp.sin(x @ y)))(jnp.zeros((8, 8)), jnp.zeros((8, 8))), 1)
    (candidate,) = candidates(step, H100)
    text = HLO.format(
        dot=DOT, first=first.format(op="sine", of="dot"), second=second.format(op="cosine", of="c")
    )
    reading = Compiled(parse(text)).read(candidate)
    assert (reading.state, reading.inside) == (state, inside)
    assert (
        reading.others == (state in ("partly", "apart")) and reading.kernel == "output fusion of the product"
    )
    assert Compiled(parse(text.replace("dsjaxop0", "other"))).read(candidate).state == "unread"


# ---- memory ----------------------------------------------------------------------------------


def test_what_a_loop_keeps_for_the_backward_pass_by_hand():
    def loss(w, x, remat):
        def layer(x, w):
            return jnp.sin(x @ w), None

        layer = jax.checkpoint(layer, prevent_cse=False) if remat else layer
        return jnp.sum(jax.lax.scan(layer, x, w)[0])

    w, x = jnp.zeros((5, 8, 8)), jnp.zeros((4, 8))
    grad = jax.grad(loss)
    each = 4 * 4 * 8
    plain = kept(walk(jax.make_jaxpr(lambda w, x: grad(w, x, False))(w, x), 1))
    full = kept(walk(jax.make_jaxpr(lambda w, x: grad(w, x, True))(w, x), 1))
    # A layer keeps its input, for its weight's gradient, and the cosine of its product; recomputed, its input alone.
    assert (plain.kept, plain.without, plain.alive, plain.freed) == (10 * each, 10 * each, 0, 0)
    # One layer at a time is computed again.
    assert (full.kept, full.without, full.alive, full.freed) == (5 * each, 10 * each, each, 4 * each)
    assert full.recomputed_flops >= 5 * 2 * 4 * 8 * 8


def test_a_run_says_what_its_recomputation_frees():
    target = aot.parse_target("cpu:8")
    runs = {r: describe(small({"fsdp": 8}, remat=r), target, None) for r in ("none", "full", "every_2")}
    found = {r: kept(_take_apart(run.program, run.batch, target)[1]) for r, run in runs.items()}
    assert found["every_2"].kept < found["full"].kept < found["none"].kept
    # Each of the three programs tells what the one without recomputation keeps.
    assert found["full"].without == pytest.approx(found["none"].without, rel=0.1)
    assert found["every_2"].without == pytest.approx(found["none"].without, rel=0.1)


def test_products_that_every_device_computes_are_told():
    target = aot.parse_target("cpu:8")
    x, w, v = on(target, (64, 64), (64, 64), (64, 64), specs=[P("fsdp"), P(), P()], dtype=jnp.float32)

    def function(x, w, v):
        with jax.named_scope("cut"):
            y = x @ w
        with jax.named_scope("whole"):
            return y @ (w @ v)

    found = explain(jax.jit(function), (x, w, v), target)
    (one,) = found.excess  # w @ v, which nothing cuts: half of the products here
    assert (one.path, one.flops) == ("whole", 2 * 2 * 64**3 / 8) and one.compiled_flops == 2 * 64**3 * (
        1 + 1 / 8
    )
    assert found.compiled_flops == found.product_flops + one.compiled_flops - one.flops
    assert any("more than the step asks for" in line and "whole" in line for line in explain_notes(found))


def test_donated_arguments_are_reused():
    target = aot.parse_target("cpu:8")
    x, y = on(target, (64, 64), (64, 64), specs=[P("fsdp"), P("fsdp")], dtype=jnp.float32)
    update = jax.jit(lambda x, y: jnp.sin(x) + y, donate_argnums=0)
    freed = explain(update, (x, y), target).freed
    assert freed.donated == freed.aliased == 64 * 64 * 4 / 8
    assert (freed.kept, freed.without_remat) == (0, 0)


# ---- the whole -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def explained() -> Explanation:
    return explain_run(small({"data": 2, "fsdp": 4}, remat="full"), aot.parse_target("cpu:8"))[1]


def test_an_explanation_counts_names_and_judges(explained):
    assert explained.compiled and explained.product_flops == pytest.approx(explained.compiled_flops, rel=0.05)
    assert explained.bytes > explained.compiled_bytes > 0 and explained.excess == ()
    kinds = {t.name: t for t in explained.kinds}
    assert sum(t.bytes for t in explained.kinds) == sum(t.bytes for t in explained.layers) == explained.bytes
    assert kinds["matmul"].bound == "compute" and kinds["elementwise"].bound == "memory"
    assert kinds["matmul"].intensity > explained.ridge["fp32"] > kinds["elementwise"].intensity
    gate = next(t for t in explained.types if t.path == "layers/mlp/gate_proj")
    assert (gate.inputs, gate.weights, gate.accumulators, gate.outputs) == (("f32",),) * 4
    silu = next(c for c in explained.candidates if c.path == gate.path and c.phase == "forward")
    assert silu.followed_by == ("activation", "gating") and silu.runs == 2
    assert [c.gain_seconds for c in explained.candidates] == sorted(
        (c.gain_seconds for c in explained.candidates), reverse=True
    )
    assert all(c.taken == (c.by != "left") and c.taken == (c.share > 0.15) for c in explained.candidates)


def test_an_explanation_is_json_tables_and_lines(explained):
    again = json.loads(json.dumps(explained.as_dict()))
    assert again["threshold"] == 0.15 and "launch" in again["formula"]
    assert len(again["candidates"]) == len(explained.candidates) and again["kinds"][0]["bound"]
    titles = [sheet.title for sheet in explain_sheets(explained)]
    assert len(titles) == 6 and any("15%" in title for title in titles)
    console = Console(file=io.StringIO(), width=110)
    show_explanation(explained, console)
    text = console.file.getvalue()
    assert "layers/mlp/gate_proj" in text and "freed by recomputation" in text and "upper bound" in text
    assert all(len(sheet.rows) <= 20 for sheet in explain_sheets(explained))
    assert any(line.startswith("check: products are") for line in explain_notes(explained))


def test_without_the_compiler_the_first_phase_stands_alone(monkeypatch):
    monkeypatch.setattr(aot, "missing_for", lambda kind: f"needs a wheel: {aot.INSTALL_AOT}")
    planned, found = explain_run(small({"fsdp": 8}), aot.parse_target("8xH100"))
    assert not planned.compiled and not found.compiled and found.compiled_flops is None
    assert found.product_flops > 0 and {c.by for c in found.candidates} <= {"unread", "left"}
    assert "NOT READ" in found.notes[0] and aot.INSTALL_AOT in found.notes[0]
    gate = next(t for t in found.types if t.path == "layers/mlp/gate_proj")
    assert gate.weights == ("f32 as bf16",)  # the type that the GPU would compute in
    x = jax.ShapeDtypeStruct((64, 64), np.float32)
    alone = explain(jax.jit(lambda x, w: jax.nn.relu(x @ w)), (x, x), "8xH100")
    assert [c.by for c in alone.candidates] == ["unread"] and alone.freed.aliased is None


def test_arguments_that_lie_elsewhere_are_refused():
    x = jax.ShapeDtypeStruct((8, 8), np.float32)
    with pytest.raises(ConfigError, match="no argument has a sharding over the devices"):
        explain(jax.jit(jnp.sin), (x,), "cpu:1")


def run(capfd, *argv):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return (ended.value.code, *capfd.readouterr())


def test_explain_as_it_is_typed(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(
        "model: {kind: llama, hidden_size: 64, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 128}\n"
        "train: {global_batch_size: 8, sequence_length: 64, steps: 20}\n"
    )
    words = "plan c.yaml --on cpu:8 --explain --json p.json --html p.html"
    code, out, err = run(capfd, *words.split())
    assert code == 0, err
    assert out.startswith("cpu:8, fsdp 8: fits") and "products and what could run in one kernel" in out
    written = json.loads((tmp_path / "p.json").read_text())
    assert written["fits"] and written["explain"]["product_flops"] > 0
    assert "products and what could run in one kernel" in (tmp_path / "p.html").read_text()
    code, out, err = run(capfd, "plan", "c.yaml", "--on", "cpu:8", "--explain", "--search")
    assert (code, out) == (2, "") and err.startswith("dsjax: --explain: is of one plan")


def test_the_function_stands_for_its_module():
    assert callable(sys.modules["dsjax.plan"].explain)
