"""Defects that public code of such networks has had (users.md 7 to 33), each written as a change of one function of ours.

A change replaces a text that stands in the function exactly once, so that a defect cannot rot unnoticed when the code moves on.
"""

import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import NamedTuple


class Defect(NamedTuple):
    """`old` in the source of `function` (module:name) becomes `new`; then `test` must fail."""

    row: int
    function: str
    old: str
    new: str
    test: str


DEFECTS = {
    "undelivered work is paid": Defect(
        7,
        "subnet.orchestration.work:_is_attested",
        "after is None or after.output_digest != backward.input_digest",
        "after is not None and after.output_digest != backward.input_digest",
        "unit/test_validation_claims.py::test_work_that_the_next_stage_never_received_earns_nothing",
    ),
    "part of the shards counts as all of them": Defect(
        8,
        "subnet.orchestration.merge:merged_shards",
        "len(merge.accepted) < len(merge.plan.shards)",
        "len(merge.accepted) < 0.3 * len(merge.plan.shards)",
        "unit/test_validation_claims.py::test_a_merge_is_whole_or_there_is_none",
    ),
    "a merge's counter begins at 1": Defect(
        13,
        "subnet.merging.reduce:reduce_shard",
        "float(sum(count for _, count in taken))",
        "float(1 + sum(count for _, count in taken))",
        "unit/test_merging_reduce.py::test_identical_vectors_keep_negative_zeros_subnormals_and_extremes",
    ),
    "NaN enters a merge": Defect(
        15,
        "subnet.merging.upload:to_vector",
        "not (np.min(vector, initial=0.0) >= -MAX_ABS and np.max(vector, initial=0.0) <= MAX_ABS)",
        "np.min(vector, initial=0.0) < -MAX_ABS or np.max(vector, initial=0.0) > MAX_ABS",
        "unit/test_merging_upload.py::test_values_that_could_poison_a_merge_are_refused",
    ),
    "NaN enters a weight": Defect(
        15,
        "subnet.adapters.weights_conform:conform",
        "not math.isfinite(weights[hotkey]) or weights[hotkey] < 0",
        "weights[hotkey] < 0",
        "unit/test_weights_conform.py::test_no_number_no_weights",
    ),
    "weights by place in a list": Defect(
        17,
        "subnet.adapters.weights_conform:conform",
        "{uid_of[hotkey].uid: value for hotkey, value in scaled.items() if value > 0}",
        "{place: value for place, (hotkey, value) in enumerate(scaled.items()) if value > 0}",
        "unit/test_weights_conform.py::test_keys_become_uids_and_the_largest_becomes_the_maximum",
    ),
    "a download that failed passes for one that did not": Defect(
        18,
        "neurons.roles.sharing:Sharing.get",
        "len(data) != ref.size_bytes or digest(data) != ref.digest",
        "len(data) > ref.size_bytes",
        "unit/test_roles_sharing.py::test_an_object_that_is_missing_or_not_the_announced_one_is_never_used",
    ),
    "any version of the protocol may join": Defect(
        20,
        "subnet.orchestration.membership:check_protocol",
        "version != wire.PROTOCOL_VERSION",
        "version < 0",
        "unit/test_membership.py::test_who_may_not_join_is_told_the_rule",
    ),
    "forwards wait for ever for backwards that never come": Defect(
        22,
        "subnet.orchestration.work:drop_expired",
        "lease.deadline_s <= turn.now_s",
        "lease.deadline_s < 0.0",
        "unit/test_work.py::test_work_after_its_lease_earns_nothing",
    ),
    "a heavy stage earns as a light one": Defect(
        23,
        "subnet.orchestration.accounts:EpochAccount.contributions",
        "len(samples) * (stage_flops[self.stage_of[hotkey]] / lightest)",
        "1.0 * len(samples)",
        "unit/test_accounts.py::test_credit_is_weighted_by_the_stages_flops",
    ),
    "a score ages only when its miner works again": Defect(
        24,
        "incentives.reward:_value",
        "if now - at < config.window_epochs",
        "if (account.credited_in or 0) - at < config.window_epochs",
        "unit/test_incentives_reward.py::test_step_decay_counts_the_last_window_in_full_and_nothing_older",
    ),
    "the score of who left does not decay": Defect(
        24,
        "incentives.reward:Scoreboard._age",
        "if account.score == 0.0:",
        "if account.credited_in != self._epoch:",
        "unit/test_incentives_reward.py::test_a_score_ages_though_its_miner_is_gone",
    ),
    "being registered earns a base score": Defect(
        25,
        "incentives.weights:weights",
        "scores[hotkey].score * scores[hotkey].trust for",
        "0.01 + scores[hotkey].score * scores[hotkey].trust for",
        "unit/test_incentives_weights.py::test_who_earned_nothing_is_left_out",
    ),
    "shards are merged by those who are registered": Defect(
        26,
        "subnet.orchestration.merge:_open_merge",
        "miners = participants(turn, stage)",
        "miners = [hotkey for hotkey in current.roster[stage] if hotkey in current.commits]",
        "unit/test_merge_phase.py::test_who_did_nothing_commits_an_empty_chain_and_is_not_merged",
    ),
    "copies of a shard are not compared": Defect(
        27,
        "subnet.orchestration.merge:_compare",
        "len(digests) == 1 and len(shard.reducers) > 1",
        "len(shard.reducers) > 1",
        "unit/test_merge_phase.py::test_copies_that_differ_are_refereed_at_once",
    ),
    "an error in validation counts as valid": Defect(
        28,
        "subnet.validation.judging:judge_segment",
        "return Outcome.FAIL, str(error), None",
        "return Outcome.PASS, str(error), None",
        "numerics/test_replay.py::test_what_does_not_hang_together_is_a_failed_audit",
    ),
    "a failed pass is only counted": Defect(
        28,
        "subnet.validation.verdict:judge",
        "if measures.num_failing >= MIN_FAILING:",
        "if measures.num_failing > measures.num_passes:",
        "unit/test_validation_verdict.py::test_judge",
    ),
    "a request can be sent again": Defect(
        30,
        "subnet.adapters.auth:verify_request",
        'if not await memory.remember_once(f"nonce:{caller.hotkey_ss58}:{caller.nonce_ns}", for_s=NONCE_MEMORY_S):',
        "if memory is None:",
        "unit/test_auth.py::test_a_replayed_nonce_is_refused_and_each_attempt_has_its_own",
    ),
    "retries share one signed header": Defect(
        31,
        "subnet.adapters.auth:RequestSigner.headers",
        "max(self._last_nonce_ns + 1, int(self._clock.now() * 1e9))",
        "int(self._clock.now() * 1e9)",
        "unit/test_auth.py::test_a_replayed_nonce_is_refused_and_each_attempt_has_its_own",
    ),
    "an object of another's counts as one's own": Defect(
        32,
        "neurons.roles.desk:Desk._check_stored",
        """f"/{sender}/" not in ref.key or not""",
        "not",
        "unit/test_validation_claims.py::test_an_object_that_another_stored_is_not_ones_own",
    ),
}


@contextmanager
def present(defect: Defect) -> Iterator[None]:
    """The function has the defect within, wherever it was imported."""
    module, _, name = defect.function.partition(":")
    function: object = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    assert isinstance(function, FunctionType)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(defect.old) == 1, f"{defect.function} does not hold {defect.old!r} once any more"
    made: dict[str, FunctionType] = {}
    exec(source.replace(defect.old, defect.new), function.__globals__, made)
    sound = function.__code__
    function.__code__ = made[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = sound
