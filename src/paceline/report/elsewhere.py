"""What other tools call the metrics of ``report.definitions``, and where their numbers are others."""

import msgspec


class Elsewhere(msgspec.Struct, frozen=True):
    """``name`` is what ``tool`` calls ``metric``; ``differs`` says how the numbers differ, empty if they do not."""

    metric: str
    tool: str
    name: str
    differs: str = ""


_SINCE_START = "counts since the engine's start; here a step"
_LAST_REPORT = "a gauge of the engine's last report; here a step"
_PER_SAMPLE = (
    "mean of the samples' ratios, not the ratio of the sums; a sample without drafts counts as 0, here as nothing"
)
_ONLY_DRAFTED = "passes with a draft only; here every decoding row counts, so this one is lower where some had none"

ELSEWHERE: tuple[Elsewhere, ...] = (
    Elsewhere(
        "tokens_per_forward",
        "vLLM",
        "1 + vllm:spec_decode_num_accepted_tokens / vllm:spec_decode_num_drafts",
        f"{_ONLY_DRAFTED}; {_SINCE_START}; called acceptance length",
    ),
    Elsewhere("tokens_per_forward", "SGLang", "sglang:spec_accept_length", _LAST_REPORT),
    Elsewhere("tokens_per_forward", "verl", "rollout/spec_accept_length", f"{_PER_SAMPLE}; {_ONLY_DRAFTED}"),
    Elsewhere("tokens_per_forward", "slime", "rollout/spec_accept_length", _PER_SAMPLE),
    Elsewhere("tokens_per_forward", "NeMo RL", "train/vllm/spec_acceptance_length", _ONLY_DRAFTED),
    Elsewhere(
        "acceptance",
        "vLLM",
        "vllm:spec_decode_num_accepted_tokens / vllm:spec_decode_num_draft_tokens",
        f"{_SINCE_START}; 0/0 where nothing was drafted",
    ),
    Elsewhere("acceptance", "SGLang", "sglang:spec_accept_rate", _LAST_REPORT),
    Elsewhere("acceptance", "verl", "rollout/spec_accept_rate", _PER_SAMPLE),
    Elsewhere("acceptance", "slime", "rollout/spec_accept_rate", _PER_SAMPLE),
    Elsewhere("acceptance", "NeMo RL", "train/vllm/spec_acceptance_rate"),
    Elsewhere(
        "depth_acceptance",
        "vLLM",
        "vllm:spec_decode_num_accepted_tokens_per_pos / vllm:spec_decode_num_drafts",
        "share of all drafts; here of those that came to the depth, so theirs is the product of these",
    ),
    Elsewhere("reward", "TRL", "reward", "samples that no reward function could score are left out; here they are 0"),
    Elsewhere("reward", "verl", "critic/rewards/mean", "after the KL penalty where it is in the reward"),
    Elsewhere("reward", "slime", "rollout/raw_reward", "`rollout/rewards` beside it is what is left within the group"),
    Elsewhere("reward_std", "TRL", "reward_std", "divided by n - 1; here by n"),
    Elsewhere("response_tokens_mean", "TRL", "completions/mean_length"),
    Elsewhere("response_tokens_mean", "verl", "response_length/mean"),
    Elsewhere("response_tokens_mean", "slime", "rollout/response_len/mean"),
    Elsewhere(
        "truncated",
        "TRL",
        "completions/clipped_ratio",
        "whose last token is neither EOS nor padding: a stop string counts",
    ),
    Elsewhere(
        "truncated", "verl", "response_length/clip_ratio", "as long as the longest allowed, even if it stopped there"
    ),
    Elsewhere("truncated", "slime", "rollout/truncated_ratio"),
    Elsewhere("tokens", "TRL", "num_tokens", "prompts too, and since the run's start"),
    Elsewhere("grad_norm", "TRL", "grad_norm"),
    Elsewhere("grad_norm", "verl", "actor/grad_norm"),
    Elsewhere("grad_norm", "prime-rl", "optim/grad_norm"),
    Elsewhere("grad_norm", "slime", "train/grad_norm"),
    Elsewhere("lr", "TRL", "learning_rate"),
    Elsewhere("lr", "prime-rl", "optim/lr"),
    Elsewhere("kl", "TRL", "kl", "not logged without a reference"),
    Elsewhere("entropy", "TRL", "entropy"),
    Elsewhere("entropy", "prime-rl", "entropy/all/mean"),
    Elsewhere(
        "entropy", "NeMo RL", "train/approx_entropy", "estimated from the sampled tokens; here from the whole law"
    ),
    Elsewhere("clip_fraction", "TRL", "clip_ratio/region_mean"),
    Elsewhere("clip_fraction", "verl", "actor/pg_clipfrac"),
    Elsewhere("clip_fraction", "slime", "train/pg_clipfrac"),
    Elsewhere("mismatch_kl", "prime-rl", "mismatch_kl/all/mean"),
    Elsewhere("mismatch_kl", "verl", "rollout_corr/k3_kl", "`rollout_corr/kl` beside it is the plain difference"),
    Elsewhere("mismatch_kl", "NeMo RL", "train/gen_kl_error", "its estimator is that of the reference penalty"),
    Elsewhere(
        "mismatch_kl",
        "TRL",
        "sampling/sampling_logp_difference/mean",
        "mean absolute difference of log-probabilities; this one is about half of their mean square",
    ),
    Elsewhere(
        "mismatch_kl", "slime", "train/train_rollout_logprob_abs_diff", "mean absolute difference of log-probabilities"
    ),
    Elsewhere(
        "mismatch_kl",
        "NeMo RL",
        "train/token_mult_prob_error",
        "mean of exp of the absolute difference: 1 where nothing differs, and a few tokens can dominate it",
    ),
    Elsewhere(
        "mismatch_kl",
        "SkyRL",
        "policy/rollout_train_prob_diff_mean",
        "mean ratio of probabilities: about 1 on policy, and a few tokens can dominate it",
    ),
    Elsewhere("importance_mean", "TRL", "sampling/importance_sampling_ratio/mean"),
    Elsewhere("importance_max", "TRL", "sampling/importance_sampling_ratio/max", "after its own cut; here before it"),
    Elsewhere("seconds", "verl", "timing_s/gen, timing_s/update_actor", "`generation` and `train` here"),
    Elsewhere("seconds", "slime", "perf/rollout_time, perf/actor_train_time", "`generation` and `train` here"),
    Elsewhere("seconds", "NeMo RL", "timing/train/generation", "`generation` here"),
)
