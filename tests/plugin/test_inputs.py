"""Fake inputs have the metadata from before the run, aliasing included; symbols become guards."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from magjit.plugin import (
    BackendContext,
    BackendError,
    CustomGuard,
    InputDescriber,
    SameInput,
    ShapeGuard,
    StorageRelation,
    ValueInput,
    fakeify,
    propagate,
    resolve,
    run_backend,
)

from .graphs import compile_for, functional_graph


def make_inputs() -> dict[str, torch.Tensor]:
    base = torch.randn(4, 6)
    grad_base = torch.randn(4, 6, requires_grad=True)
    storage_mate = torch.empty(0).set_(base.untyped_storage(), 3, (2, 2), (2, 1))
    with torch.inference_mode():
        inference = torch.randn(3)
    return {
        "plain": torch.randn(3, 4),
        "transposed": torch.randn(3, 4).t().contiguous().t(),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "leaf with grad": torch.randn(2, requires_grad=True),
        "non-leaf": grad_base * 2,
        "view": base[1:, ::2],
        "view of a leaf": grad_base[0],
        "detached": grad_base.detach(),
        "same storage, no view": storage_mate,
        "expanded": torch.randn(3, 1).expand(3, 5),
        "zero-dim": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([True]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "conjugate view": torch.randn(3, dtype=torch.complex64).conj(),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "inference tensor": inference,
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
    }


@pytest.mark.parametrize("kind", list(make_inputs()))
def test_metadata_is_faithful(kind: str) -> None:
    real = make_inputs()[kind]
    gm = functional_graph(lambda x: x)
    fakes = fakeify(gm, [InputDescriber().describe(real)])
    (fake,) = fakes.values
    assert type(fake).__name__ == "FakeTensor"
    assert fake.fake_mode is fakes.fake_mode
    assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)
    assert fake.layout == real.layout
    assert fake.requires_grad == real.requires_grad
    assert fake.is_leaf == real.is_leaf
    assert fake.is_conj() == real.is_conj()
    assert isinstance(fake, torch.nn.Parameter) == isinstance(real, torch.nn.Parameter)
    if real.layout is torch.strided:
        assert fake.stride() == real.stride()
        assert fake.storage_offset() == real.storage_offset()
        assert fake._is_view() == real._is_view()


def test_describing_is_before_the_run() -> None:
    x = torch.randn(3, 4)
    given = InputDescriber().describe(x)
    x.t_()
    x.requires_grad_()
    (fake,) = fakeify(functional_graph(lambda x: x), [given]).values
    assert (fake.shape, fake.stride(), fake.requires_grad) == ((3, 4), (4, 1), False)


def test_aliases_stay_aliases() -> None:
    base = torch.randn(4, 6)
    describer = InputDescriber()
    given = [describer.describe(x) for x in (base, base[1], base.view(-1), torch.randn(4, 6), base)]
    fakes = fakeify(functional_graph(lambda a, b, c, d, e: (a, b, c, d, e)), given).values
    storages = [fake.untyped_storage()._cdata for fake in fakes]
    assert storages[0] == storages[1] == storages[2] == storages[4] != storages[3]
    assert fakes[1]._base is fakes[0] and fakes[2]._base is fakes[0]
    assert fakes[4] is fakes[0]


def test_descriptions_keep_nothing_alive() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    x.sum().backward()
    view = x[1:]
    references = [weakref.ref(x), weakref.ref(view), weakref.ref(x.grad)]
    describer = InputDescriber()
    given = [describer.describe(x), describer.describe(view)]
    del x, view
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    assert len(fakeify(functional_graph(lambda a, b: (a, b)), given).values) == 2


def test_quantized_inputs_are_refused_by_name() -> None:
    x = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)
    with pytest.raises(BackendError, match="cannot be faked"):
        fakeify(functional_graph(lambda x: x), [InputDescriber().describe(x)])
    (out,) = compile_for("eager", lambda x: x.dequantize(), [x])(x)
    assert torch.equal(out, x.dequantize())


def test_wrong_number_of_inputs() -> None:
    with pytest.raises(BackendError, match="1 placeholders"):
        compile_for("aot_eager", lambda x: x, [torch.ones(1), torch.ones(1)])


def test_propagation_annotates_every_node_and_runs_nothing() -> None:
    x = torch.ones(3, 4)
    gm = functional_graph(lambda x: x.add_(1).t() @ x)
    propagate(gm, [InputDescriber().describe(x)])
    assert torch.equal(x, torch.ones(3, 4))
    shapes = {
        node.name: tuple(node.meta["example_value"].shape)
        for node in gm.graph.nodes
        if node.op != "output"
    }
    assert shapes == {"x": (3, 4), "add_": (3, 4), "t": (4, 3), "matmul": (4, 4)}


def test_propagation_names_the_node_that_fails() -> None:
    gm = functional_graph(lambda x: x @ x)
    with pytest.raises(BackendError, match="matmul"):
        propagate(gm, [InputDescriber().describe(torch.ones(3, 4))])


# --- guards -----------------------------------------------------------------------------


def holds(guard: ShapeGuard, *inputs: torch.Tensor) -> bool:
    return guard.predicate()(inputs)


def test_dynamic_sizes_give_guards() -> None:
    context = BackendContext(dynamic=True)
    x, y = torch.randn(5, 4), torch.randn(7, 4)
    compiled = compile_for("aot_eager", lambda x, y: torch.cat([x, y]) + 1, [x, y], context=context)
    x2, y2 = torch.randn(9, 4), torch.randn(3, 4)
    torch.testing.assert_close(compiled(x2, y2)[0], torch.cat([x2, y2]) + 1)
    assert context.guards
    assert all(isinstance(guard, ShapeGuard) for guard in context.guards)
    assert all(holds(guard, x2, y2) for guard in context.guards)
    assert not all(holds(guard, torch.randn(9, 5), y2) for guard in context.guards)


def test_marked_dimension_is_dynamic_and_the_rest_static() -> None:
    x = torch.randn(5, 4)
    torch._dynamo.mark_dynamic(x, 0)
    context = BackendContext()
    compiled = compile_for("aot_eager", lambda x: x * 2, [x], context=context)
    assert isinstance(context.tracing_context.fake_mode.shape_env, type(context.shape_env))
    x2 = torch.randn(11, 4)
    torch.testing.assert_close(compiled(x2)[0], x2 * 2)
    assert all(guard.inputs == (0,) for guard in context.guards)


def test_marked_dimension_that_gets_specialised_is_an_error() -> None:
    x = torch.randn(5, 4)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(BackendError, match="specialized|dynamic"):
        compile_for("aot_eager", lambda x: x.view(5, 2, 2), [x])


def test_specialised_symbol_is_a_guard() -> None:
    context = BackendContext(dynamic=True)
    compile_for("aot_eager", lambda x: x.view(5, 2, 2), [torch.randn(5, 4)], context=context)
    assert any(
        holds(guard, torch.randn(5, 4)) and not holds(guard, torch.randn(6, 4))
        for guard in context.guards
    )


def test_lifted_int() -> None:
    gm = functional_graph(lambda x, n: x.view(n, -1) * n)
    x = torch.randn(6, 4)
    context = BackendContext()
    given = [InputDescriber().describe(x), ValueInput(3, dynamic=True)]
    compiled = run_backend(resolve("aot_eager"), gm, given, context)
    torch.testing.assert_close(compiled(x, 3)[0], x.view(3, -1) * 3)
    torch.testing.assert_close(compiled(x, 8)[0], x.view(8, -1) * 8)
    assert all(1 in guard.inputs for guard in context.guards)


def test_one_tensor_as_two_inputs_is_a_guard() -> None:
    x, y = torch.ones(3), torch.ones(2)
    context = BackendContext()
    compiled = compile_for(
        "aot_eager", lambda y, a, b: (a.add_(1), b * 2, y + 1), [y, x, x], context=context
    )
    assert context.guards == [SameInput(1, 2)]
    out = compiled(y, x, x)
    assert torch.equal(out[1], torch.full((3,), 4.0))


def test_backend_guards_move_with_the_inputs() -> None:
    class Guarding:
        name = "guarding"

        def supports(self, gm):
            return []

        def compile(self, gm, example_inputs, context):
            context.add_guard(CustomGuard((1,), lambda y: y.is_contiguous(), "y is contiguous"))
            context.add_guard(ShapeGuard("inputs[1].size()[0] > 1", (1,)))
            return gm.forward

    x, y = torch.ones(3), torch.ones(2)
    context = BackendContext()
    compile_for(Guarding(), lambda a, b, y: (a + b, y), [x, x, y], context=context)
    custom, shape, same = context.guards
    assert custom.inputs == (2,)
    assert (shape.expression, shape.inputs) == ("inputs[2].size()[0] > 1", (2,))
    assert same == SameInput(0, 1)


def test_guards_mean_what_they_say() -> None:
    x = torch.randn(8)
    assert SameInput(0, 1).predicate()([x, x])
    assert not SameInput(0, 1).predicate()([x, x[:]])
    relation = StorageRelation((0, 1), (2,))
    assert relation.predicate()([x[:4], x[2:6], x[6:]])
    assert not relation.predicate()([x[:4], x[2:6], x[5:]])
    assert not relation.predicate()([x[:4], x[4:6], x[6:]])
    assert relation.at([4, 5, 7]) == StorageRelation((4, 5), (7,))


def test_overlapping_and_written_inputs_with_symbols() -> None:
    x = torch.randn(8, 4)
    given = [x, x[4:]]
    context = BackendContext(dynamic=True)
    compiled = compile_for("aot_eager", lambda a, b: (a.add_(1), b * 2), given, context=context)
    reference = x.clone() + 1
    _, out = compiled(*given)
    torch.testing.assert_close(x, reference)
    torch.testing.assert_close(out, reference[4:] * 2)
    assert StorageRelation((0, 1), ()) in context.guards
