import pytest

from jaxrl.algos.advantages import ADVANTAGES
from jaxrl.algos.aggregation import AGGREGATIONS
from jaxrl.algos.policy_losses import INPUTS, POLICY_LOSSES
from jaxrl.algos.registry import check_inputs, inputs_of, lookup
from jaxrl.errors import UserError


def test_a_known_name_finds_its_function():
    assert lookup(ADVANTAGES, "grpo", "advantage estimator") is ADVANTAGES["grpo"]


@pytest.mark.parametrize("table", [ADVANTAGES, AGGREGATIONS, POLICY_LOSSES])
def test_an_unknown_name_lists_the_known_ones(table):
    with pytest.raises(UserError, match="thing 'grppo' is not known") as error:
        lookup(table, "grppo", "thing")
    assert all(name in str(error.value) for name in table)


def test_inputs_are_the_positional_arguments():
    assert inputs_of(ADVANTAGES["opo"]) == ("score_B", "group_B", "length_B")
    assert inputs_of(ADVANTAGES["gae"]) == ("reward_BT", "value_BT", "mask_BT", "segment_ids_BT")


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_takes_arrays_that_there_are(name):
    check_inputs(POLICY_LOSSES[name], INPUTS, name)


def test_an_unknown_array_is_refused():
    def loss(logprob, teacher_logprob_BT, *, coef):
        """Takes what there is not."""

    with pytest.raises(UserError, match="my loss takes teacher_logprob, which nothing computes"):
        check_inputs(loss, INPUTS, "my loss")


def test_a_function_of_ones_own_is_found_by_its_path(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def loss(logprob, advantage):\n    return -advantage * logprob, {}\n")
    loss = lookup(POLICY_LOSSES, f"{file}:loss", "policy loss")
    assert inputs_of(loss) == ("logprob", "advantage")
    with pytest.raises(UserError, match="has no 'lost'; it has loss"):
        lookup(POLICY_LOSSES, f"{file}:lost", "policy loss")
