"""The log gives every sample its own tokens, whatever the others do."""

import numpy as np
import pytest

from jaxrl.rollout import decoded_log
from jaxrl.rollout.decode_state import DecodedTokens
from jaxrl.rollout.decoded_log import DecodedLog

W = 4


def dispatch(rng, count_n) -> DecodedTokens:
    shape = (len(count_n), W)
    return DecodedTokens(
        np.asarray(count_n, np.int32),
        rng.integers(0, 1000, shape).astype(np.int32),
        rng.normal(size=shape).astype(np.float32),
        rng.normal(size=shape).astype(np.float32),
    )


def test_by_hand():
    log, rng = DecodedLog(3), np.random.default_rng(0)
    log.start(np.array([0, 1]))
    first = dispatch(rng, [4, 4, 0])
    log.append(first)
    log.start(np.array([2]))
    second = dispatch(rng, [2, 4, 4])
    log.append(second)
    token, logprob, entropy, version = log.take(0, 3).arrays
    np.testing.assert_array_equal(version, [3] * 6)
    np.testing.assert_array_equal(token, [*first.token[0], *second.token[0, :2]])
    np.testing.assert_array_equal(logprob, [*first.logprob[0], *second.logprob[0, :2]])
    np.testing.assert_array_equal(entropy, [*first.entropy[0], *second.entropy[0, :2]])
    np.testing.assert_array_equal(log.tail(1, 5), [first.token[1, 3], *second.token[1]])
    np.testing.assert_array_equal(log.take(2, 3).tokens, second.token[2])
    # A sample that goes on begins another stretch.
    assert len(log.take(2, 3)) == 0


@pytest.mark.parametrize("columns", [4, 7, 256])
@pytest.mark.parametrize("seed", range(5))
def test_every_sample_gets_its_own_tokens(columns, seed, monkeypatch):
    """Against lists: slots start, end, pause, move and are taken at random."""
    monkeypatch.setattr(decoded_log, "_COLUMNS", columns)
    rng = np.random.default_rng(seed)
    n = 6
    log, own = DecodedLog(n), {}
    for _ in range(200):
        for slot in range(n):
            if slot not in own and rng.random() < 0.5:
                log.start(np.array([slot]))
                own[slot] = []
        if rng.random() < 0.1:
            old_n = rng.permutation(n)
            idle = rng.random(n) < 0.2
            old_n[idle] = -1
            log = log.moved(old_n)
            own = {new: own[old] for new, old in enumerate(old_n) if old in own}
        steps = int(rng.integers(1, W + 1))
        ends = [slot for slot in own if rng.random() < 0.2]
        # At least one slot decodes every step.
        ends = ends[: len(own) - 1]
        count = [steps if slot in own else 0 for slot in range(n)]
        for slot in ends:
            count[slot] = int(rng.integers(1, steps + 1))
        decoded = dispatch(rng, count)
        log.append(decoded)
        for slot in own:
            own[slot] += decoded.token[slot, : count[slot]].tolist()
        if rng.random() < 0.5:
            log.settle()
        decoded.token[:] = -1  # the memory is used again
        for slot in own:
            last = int(rng.integers(0, 12))
            wanted = own[slot][max(0, len(own[slot]) - last) :]
            assert log.tail(slot, last).tolist() == wanted
        given, received = {}, {}
        for slot in ends:
            if rng.random() < 0.5:
                assert log.take(slot, 3).tokens.tolist() == own[slot]
            else:
                cut = int(rng.integers(0, count[slot] + 1))
                given[slot] = own[slot][: len(own[slot]) - cut]
                log.give_later(
                    np.array([slot]),
                    np.array([cut]),
                    3,
                    [lambda x, slot=slot, to=received: to.update({slot: x.tokens.tolist()})],
                )
                # Another sample starts in the slot before the tokens are passed on.
                log.start(np.array([slot]))
            own[slot] = []
            if rng.random() < 0.7:
                log.stop(np.array([slot]))
                del own[slot]
        if given and rng.random() < 0.5:
            log = log.moved(np.arange(n))
        else:
            log.settle()
        assert received == given
    # Blocks that nobody needs are gone.
    assert len(log._blocks) < 60 * W / columns + 3
