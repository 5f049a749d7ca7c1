"""Samples depend on seed and step, not on the plan; they can be learned, and targets are as many as said."""

import numpy as np

from makespan.training import MODEL_FAMILIES, SmallModel
from makespan.training.zoo.small import IGNORED, global_batch, targets_per_sample


def test_equal_seed_and_step_give_equal_samples():
    for model in map(SmallModel, MODEL_FAMILIES):
        first, again = global_batch(model, 8, 3, 5), global_batch(model, 8, 3, 5)
        np.testing.assert_array_equal(first.inputs, again.inputs)
        np.testing.assert_array_equal(first.targets, again.targets)
        for other in (global_batch(model, 8, 4, 5), global_batch(model, 8, 3, 6)):
            assert not np.array_equal(first.inputs, other.inputs), model


def test_every_sample_has_the_stated_number_of_targets():
    for model in map(SmallModel, MODEL_FAMILIES):
        targets = global_batch(model, 8, 0, 0).targets.reshape(8, -1)
        assert set((targets != IGNORED).sum(axis=1)) == {targets_per_sample(model)}, model
        assert targets[targets != IGNORED].min() >= 0
        assert targets.max() < model.vocab


def test_the_next_token_mostly_follows_from_the_last_one():
    model = SmallModel("gpt")
    batch = global_batch(model, 200, 0, 0)
    followers = {}
    for token, follower in zip(batch.inputs.ravel(), batch.targets.ravel(), strict=True):
        followers.setdefault(token, []).append(follower)
    share = [np.bincount(found).max() / len(found) for found in followers.values()]
    assert 0.7 < np.mean(share) < 0.95
