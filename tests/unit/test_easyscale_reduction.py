"""Who hosts which logical worker, how gradients are packed, and what is refused."""

import subprocess
import sys

import pytest

from makespan.easyscale.job import RankMapping
from makespan.errors import InputError, UnknownNameError

torch = pytest.importorskip("torch")

from torch import nn

from makespan.easyscale.reduction import (
    Buckets,
    Exchange,
    GradientSet,
    GradientTaker,
    HostCopies,
    ReadyOrder,
    Reduction,
    in_memory,
    provisional_map,
    rebuilt_map,
    reduce_sets,
    ring_chunks,
    trained_parameters,
    unordered_map,
)


def test_the_paper_and_its_mappings_are_read_without_torch():
    code = (
        "import sys, makespan.papers.easyscale, makespan.easyscale.job as r\n"
        "r.RankMapping.parse('0,1/2'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_mapping_is_read_as_it_is_printed():
    mapping = RankMapping.parse("3,1/0/2")
    assert (mapping.hosted, str(mapping)) == (((3, 1), (0,), (2,)), "3,1/0/2")
    assert (mapping.n_logical_workers, mapping.n_processes) == (4, 3)
    assert [str(RankMapping.even(4, n)) for n in (1, 2, 3, 4)] == ["0,1,2,3", "0,1/2,3", "0,1/2/3", "0/1/2/3"]


@pytest.mark.parametrize("text", ["", "0,1/", "0;1", "a", "0,-1", "0,,1"])
def test_a_text_that_is_no_mapping_is_refused(text):
    with pytest.raises(InputError, match="expected ranks by process, for example 0,1/2/3"):
        RankMapping.parse(text)


def test_every_logical_worker_has_one_host_and_every_process_something_to_do():
    for text in ("0,1/1", "1/2", "0/2"):
        with pytest.raises(InputError, match="expected each of 0 to"):
            RankMapping.parse(text)
    with pytest.raises(InputError, match="process 1 hosts no logical worker"):
        RankMapping(((0, 1), ()))
    with pytest.raises(InputError, match="expected each of 0"):
        RankMapping(())
    with pytest.raises(InputError, match="5 processes for 4 logical workers; expected 1 to 4"):
        RankMapping.even(4, 5)


def test_chunks_of_the_ring_follow_the_segments_of_gloo():
    assert ring_chunks(7, 4, 4) == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert ring_chunks(1, 3, 4) == [(0, 1), (1, 1), (1, 1)]
    # 6 MiB and a bit on 2 ranks: 7 segments, rounded up to 8, 4 a rank of 196609 elements
    length = (6 << 18) + 1
    assert ring_chunks(length, 2, 4) == [(0, 4 * 196_609), (4 * 196_609, length)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scaling": "mid"}, "scaling is 'mid'; expected pre, post"),
        ({"bucket_cap_bytes": 0}, "bucket_cap_bytes is 0; expected a whole number >= 1"),
        ({"n_logical_workers": 0}, "n_logical_workers is 0"),
    ],
)
def test_choices_of_a_reduction_are_checked(options, message):
    with pytest.raises(InputError, match=message):
        Reduction(**{"n_logical_workers": 2, **options})
    with pytest.raises(UnknownNameError, match=r"reduction order 'rings'; expected rank, ring"):
        Reduction(2, "rings")


# --- buckets ------------------------------------------------------------------------------------------


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def test_gradients_come_back_from_flat_vectors_in_their_memory_layout():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3)).to(memory_format=torch.channels_last)
    parameters = trained_parameters(model)
    model(torch.rand(1, 2, 6, 6)).sum().backward()
    before = {name: one.grad.clone() for name, one in parameters.items()}
    buckets = Buckets(parameters, rebuilt_map(parameters, list(parameters), 64))
    taken = buckets.take(1.0)
    assert all(one.grad is None for one in parameters.values())
    assert len(taken.pieces) > 1
    dense = before["0.weight"].permute(0, 2, 3, 1).reshape(-1)
    assert torch.equal(taken.pieces[0][0], dense)
    buckets.bind(buckets.views([torch.cat(pieces) for pieces in taken.pieces]), taken.used)
    assert all(torch.equal(one.grad, before[name]) for name, one in parameters.items())


def test_buckets_are_closed_at_their_limit_and_hold_one_type():
    parameters = {
        "a": nn.Parameter(torch.zeros(6)), "b": nn.Parameter(torch.zeros(2, dtype=torch.float64)),
        "c": nn.Parameter(torch.zeros(1)), "d": nn.Parameter(torch.zeros(1)),
    }  # fmt: skip
    assert provisional_map(parameters) == (("a", "c", "d"), ("b",))
    assert rebuilt_map(parameters, ["d", "c", "b"], 8) == (("d", "c"), ("b",), ("a",))
    assert rebuilt_map(parameters, ["d", "c", "b", "a"]) == (("d", "c", "a"), ("b",))


def test_the_default_gives_the_first_bucket_1_mib_and_others_25():
    parameters = {name: nn.Parameter(torch.empty(1 << 18, device="meta")) for name in map(str, range(60))}
    sizes = [len(names) for names in rebuilt_map(parameters, list(parameters))]
    assert sizes == [1, 25, 25, 9]


def test_buckets_of_passes_that_leave_parameters_out_are_in_the_order_of_the_model():
    parameters = {name: nn.Parameter(torch.zeros(1)) for name in "abc"}
    assert unordered_map(parameters, 8) == (("a", "b"), ("c",))


def test_the_order_of_readiness_is_that_of_the_backward_pass():
    model, parameters = small(), trained_parameters(small())
    recorder = ReadyOrder(trained_parameters(model))
    model(torch.rand(2, 4)).sum().backward()
    order = recorder.finish()
    assert sorted(order) == sorted(parameters)
    assert {name[0] for name in order[:2]} == {"2"}
    model(torch.rand(2, 4)).sum().backward()
    assert recorder.finish() == order


def test_a_gradient_missing_somewhere_counts_as_zero_and_one_missing_everywhere_stays_missing():
    model = small()
    parameters = trained_parameters(model)
    buckets, reduction = Buckets(parameters, provisional_map(parameters)), Reduction(2)
    sets = []
    for weight in (3.0, None):
        parameters["2.bias"].grad = None if weight is None else torch.full((3,), weight)
        sets.append(buckets.take(reduction.set_scale))
    total = in_memory([reduce_sets(sets, RankMapping.even(2, 1), 0, reduction)])[0]
    buckets.bind(buckets.views(total.buckets), total.used)
    assert parameters["2.bias"].grad.tolist() == [1.5] * 3
    assert [name for name, one in parameters.items() if one.grad is not None] == ["2.bias"]


def test_a_pass_of_a_parameter_that_was_frozen_for_a_while_is_noticed():
    model = small()
    model[2].bias.requires_grad_(False)
    parameters = dict(model.named_parameters())
    buckets = Buckets(parameters, provisional_map(parameters))
    taker = GradientTaker(buckets, 1.0, HostCopies(torch.device("cpu")), keeps_sums=False, accumulates=True)
    model[2].bias.requires_grad_(True)
    with taker.listening():
        with taker.passing():
            model(torch.ones(1, 4)).sum().backward()
        model[2].bias.grad.mul_(2.0)
        with pytest.raises(InputError, match=r"the gradient of 2\.bias was changed in the turn"):
            taker.take(0)
        with pytest.raises(InputError, match="a backward pass that the loop does not know adds to"):
            model[2].bias.sum().backward()


class Joined(nn.Module):
    """Two weights whose gradients are parts of one tensor, because a product takes them as one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.full((2, 4), value)) for value in (1.0, 2.0))

    def forward(self, inputs):
        return inputs @ torch.cat([self.first, self.second]).T


def test_a_second_pass_may_add_to_a_part_of_what_the_first_one_made():
    model = Joined()
    parameters = dict(model.named_parameters())
    buckets = Buckets(parameters, provisional_map(parameters))
    taker = GradientTaker(buckets, 1.0, HostCopies(torch.device("cpu")), keeps_sums=False, accumulates=True)
    with taker.listening():
        with taker.passing():
            model(torch.ones(3, 4)).sum().backward()
        one, other = model.first.grad, model.second.grad
        assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        with taker.passing():
            model.first.sum().backward()
        [[first, second]] = taker.take(0).pieces
        assert sorted([first.unique().item(), second.unique().item()]) == [3.0, 4.0]
        with taker.passing():
            model(torch.ones(3, 4)).sum().backward()
        model.second.grad.mul_(2.0)
        with pytest.raises(InputError, match="was changed in the turn"), taker.passing():
            model.first.sum().backward()


def test_what_is_not_a_number_goes_through_the_sum():
    sets = [
        GradientSet([[torch.tensor([one, 1.0])]], torch.tensor([True])) for one in (torch.inf, 1.0, torch.nan)
    ]
    for total in in_memory(
        [
            reduce_sets([sets[rank] for rank in ranks], RankMapping.even(3, 2), process, Reduction(3))
            for process, ranks in enumerate(RankMapping.even(3, 2).hosted)
        ]
    ):
        assert total.buckets[0].isnan().tolist() == [True, False]


def test_what_cannot_be_packed_is_refused_by_name():
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
    parameters = trained_parameters(model)
    with pytest.raises(InputError, match=r"bucket map: 1\.bias; expected each trained parameter once"):
        Buckets(parameters, (("0.weight", "1.weight"),))
    with pytest.raises(InputError, match=r"bucket map: 1\.bias, 1\.bias; expected"):
        Buckets(parameters, (("0.weight", "1.weight"), ("1.bias", "1.bias")))
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(InputError, match=r"parameter 0\.weight has a sparse gradient"):
        Buckets(parameters, provisional_map(parameters)).take(1.0)
    with pytest.raises(InputError, match=r"parameter weight is torch\.float16; expected torch\.float32"):
        trained_parameters(nn.Linear(2, 2).half())
    frozen = nn.Linear(2, 2)
    frozen.bias.requires_grad_(False)
    assert list(trained_parameters(frozen)) == ["weight"]


def test_processes_that_do_not_do_the_same_are_found_out():
    def steps(*lengths):
        for length in lengths:
            yield Exchange([torch.zeros(2), torch.zeros(2)], [length, length])

    with pytest.raises(RuntimeError, match=r"sent \[2, 2\], expected \[3, 3\]"):
        in_memory([steps(2), steps(3)])
    with pytest.raises(RuntimeError, match="1 of 2 have ended"):
        in_memory([steps(2), steps(2, 2)])
