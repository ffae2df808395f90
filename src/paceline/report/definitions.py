"""The one definition of every metric of a training step."""

import msgspec


class Metric(msgspec.Struct, frozen=True):
    """What a field of ``StepRecord`` means. ``unit`` is empty for a pure number."""

    name: str
    unit: str
    definition: str


#: The phases that a step's seconds are split into, in the order of the step. They add up to the step's wall clock.
PHASES: tuple[str, ...] = ("generation", "reward", "train", "drafter", "refit", "check", "eval", "other")

#: What the identity check may have found, from good to bad. ``law only``: tokens differ, and ``engine.acceptance``
#: promises no more than equal distributions, which comparing tokens cannot check; ``paceline audit`` can.
IDENTITIES: tuple[str, ...] = ("not checked", "identical", "near ties", "law only", "violation")

METRICS: tuple[Metric, ...] = (
    Metric("step", "", "Number of the training step, counted from 0."),
    Metric("epoch", "", "How often the step's prompts had been visited before, counted from 0."),
    Metric("reward", "", "Mean reward over the step's rollouts, after shaping. A reward that raised counts as 0."),
    Metric("reward_std", "", "Standard deviation of the reward over the step's rollouts."),
    Metric("rollouts", "rollouts", "Responses sampled in the step: prompts x group size."),
    Metric("tokens", "tokens", "Tokens emitted in the step's rollouts, stop tokens included."),
    Metric("response_tokens_mean", "tokens", "tokens / rollouts."),
    Metric(
        "tokens_per_forward",
        "tokens",
        "Tokens emitted / row-forwards. A row-forward is one decoding row in one policy pass: plain decoding gives 1.",
    ),
    Metric("acceptance", "", "Drafted tokens that were kept / drafted tokens. NaN where nothing was drafted."),
    Metric("drafted_per_forward", "tokens", "Drafted tokens / row-forwards."),
    Metric("policy_forwards", "passes", "Policy passes of the engine in the step's generation, whatever their batch."),
    Metric("loss", "", "The loss that the step's last update minimised, averaged over its micro-batches by tokens."),
    Metric("grad_norm", "", "Norm of the gradient before clipping, mean over the step's updates."),
    Metric("lr", "", "Learning rate of the step's last update."),
    Metric("kl", "nats", "Mean KL estimate per token between the policy and the reference; 0 without a reference."),
    Metric("entropy", "nats", "Mean entropy per token of the distribution that was sampled."),
    Metric("clip_fraction", "", "Share of tokens whose probability ratio was clipped."),
    Metric(
        "mismatch_kl",
        "nats",
        "Mean KL estimate per token between the log-probabilities of the sampler and of the trainer before its update: "
        "rounding where the weights are the same, and drift where the rollouts are older.",
    ),
    Metric("reward_errors", "rollouts", "Rollouts whose reward raised or ran out of time; their reward is 0."),
    Metric("truncated", "", "Share of rollouts that ended at the length limit."),
    Metric("weight_version", "", "Version of the policy's weights that the rollouts were sampled from."),
    Metric(
        "seconds",
        "s",
        "Wall clock of the step by phase: "
        + ", ".join(PHASES)
        + ". Where decoding overlaps with the rest, generation is "
        "what was waited for.",
    ),
    Metric(
        "plain_seconds_projected",
        "s",
        "Generation time that the same tokens would have taken without drafts, from the measured step-time table.",
    ),
    Metric("speedup_projected", "x", "plain_seconds_projected / seconds of generation."),
    Metric(
        "plain_seconds_measured",
        "s",
        "Time of decoding the identity check's batch without drafts. NaN in steps without a check.",
    ),
    Metric(
        "speedup_measured",
        "x",
        "plain_seconds_measured / the time the same batch took with drafts. NaN in steps without a check.",
    ),
    Metric(
        "plain_seconds_counterfactual",
        "s",
        "What plain passes over the same rows would have taken for the tokens of each pass, summed over the passes.",
    ),
    Metric(
        "verified_share",
        "",
        "Drafted tokens that were verified / tokens that the drafter offered. NaN where nothing was offered.",
    ),
    Metric("passes_plain", "passes", "Decoding passes without a draft: none was offered, or none was worth its time."),
    Metric("passes_probed", "passes", "Passes that verified a few drafted tokens to see whether drafting pays again."),
    Metric(
        "prefetch_coverage",
        "",
        "Drafts that were ready when they were asked for / drafts asked for. NaN where none was asked for.",
    ),
    Metric("draft_seconds_share", "", "Time that generation waited for the drafter / seconds of generation."),
    Metric(
        "drafter_version",
        "",
        "Version of the policy that the drafter's own weights were made for; null where it has none, as history.",
    ),
    Metric(
        "canary_acceptance",
        "",
        "Share of the tokens of the sentinel's last canaries that had been drafted, before the step. NaN without any.",
    ),
    Metric("draft_trained", "", "Whether the model that drafts was trained in the step."),
    Metric(
        "draft_reason",
        "",
        "Why it was or was not: `every` so many steps and `between` them, to `measure`, for `drift` or `growth`, "
        "as a `probe`, or not, as it `rests` or is `never` trained.",
    ),
    Metric(
        "draft_loss",
        "nats",
        "Cross-entropy of the drafter against the policy's law before the training, a row, weighted over the depths.",
    ),
    Metric(
        "draft_overlaps",
        "",
        "By depth, the mass that drafter and policy have in common, before the training: what rejection would accept.",
    ),
    Metric("draft_grad_norm", "", "Norm of the drafter's gradient before its own clipping, mean over its updates."),
    Metric("draft_train_seconds", "s", "What the training took, passes and refit of the drafter included."),
    Metric(
        "draft_drift_seconds",
        "s",
        "Generation time lost since the last training, as fewer drafts are kept than right after it.",
    ),
    Metric(
        "draft_growth_seconds",
        "s",
        "Generation time that a training should save by what the last one made the drafter better for good.",
    ),
    Metric("draft_propose_seconds", "s", "Time that generation waited for drafts, catching up on texts left out."),
    Metric("draft_read_seconds", "s", "Of waiting for the drafter, what it took to catch up on prompts and texts."),
    Metric("draft_refit_seconds", "s", "Of `draft_train_seconds`, what handing the drafter to the engine took."),
    Metric(
        "draft_stall_seconds",
        "s",
        "Time that pipeline stages waited for a free slot for their taps, over one rank of each stage together. NaN "
        "where the policy is not cut into stages, or no drafter learned.",
    ),
    Metric(
        "draft_gain_seconds",
        "s",
        "plain_seconds_counterfactual - what the step's passes took, waiting for the drafter included, its training "
        "not. NaN where the engine does not know.",
    ),
    Metric(
        "ages",
        "rollouts",
        "Entry a: rollouts of age a, which is the step less the version of their oldest token, as step s learns by "
        "version s. Empty where it was not recorded.",
    ),
    Metric(
        "importance_mean",
        "",
        "Mean importance weight over the tokens that were corrected, cut at the limit. NaN where none was corrected.",
    ),
    Metric("importance_max", "", "Greatest importance weight, before it was cut. NaN where none was corrected."),
    Metric("importance_beyond", "", "Share of tokens whose importance weight was above the limit."),
    Metric(
        "effective_samples",
        "",
        "(sum of importance weights)^2 / (tokens x sum of their squares): 1 where all weigh the same.",
    ),
    Metric(
        "exposed_generation_seconds",
        "s",
        "Time of the step in which the learner waited for rollouts; a synchronous run waits for all of the generation.",
    ),
    Metric(
        "exposed_training_seconds",
        "s",
        "Time in which a worker had nothing to decode while the learner worked, mean over the workers.",
    ),
    Metric("overlap_share", "", "Share of the step in which the learner and at least one worker were busy at once."),
    Metric(
        "idle_shares",
        "",
        "By role, share of the step in which it did nothing or waited, mean over its processes: `learner`, `worker`..",
    ),
    Metric("groups_waiting", "groups", "Groups that were complete at the end of the step and that no step had used."),
    Metric("workers_up", "workers", "Rollout workers that were up at the end of the step; 0 without workers on Ray."),
    Metric(
        "identity",
        "",
        "Whether the tokens of the checked batch equal those of plain decoding: " + ", ".join(IDENTITIES) + ".",
    ),
    Metric(
        "lossy",
        "",
        "Settings of the engine under which tokens need not follow the policy's law; empty unless `allow_lossy`.",
    ),
    Metric("eval_reward", "", "Mean reward on the held-out prompts, greedy. NaN in steps without an evaluation."),
    Metric("task_rewards", "", "Mean reward by task."),
    Metric("accept_lengths", "row-forwards", "Entry k: row-forwards in which exactly k drafted tokens were kept."),
    Metric(
        "depths_tested",
        "row-forwards",
        "Entry d: row-forwards that came to a drafted token at depth d + 1, which is all with a draft at first.",
    ),
    Metric(
        "depth_acceptance",
        "",
        "Entry d: share of those that kept a token there. The same for chains and trees: siblings are one test.",
    ),
    Metric("token_sources", "tokens", "Tokens by where they came from: the policy's own sample, or who drafted them."),
    Metric("events", "", "Named faults and fallbacks of the step, with their counts."),
)

#: Events of runs with workers: what a name stands for.
EVENTS: dict[str, str] = {
    "worker_lost": "A rollout worker's process ended; another one took its place.",
    "worker_hung": "A rollout worker showed no progress for `cluster.hang_seconds` and was replaced.",
    "requests_retried": "Requests of a lost worker that were decoded again, with the same noise.",
    "rollouts_late": "Rollouts of a worker that was believed dead, dropped because another one has them.",
    "history_batches_dropped": "Batches of rollouts that did not reach the history of other workers in time.",
    "broadcast_fell_back": "Weights that could not be broadcast and went through Ray's object store.",
    "weights_by_object": "Weights that went through Ray's object store as there was no shared memory for them.",
}
