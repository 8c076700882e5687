"""Which settings of a GRPOConfig hold for a queue: the others are refused, or named in a warning.

TRL's settings that its GRPOTrainer reads itself stay as they are. What the producers, the queue or its chain have taken
over stands in the tables here, with where it is set now.
"""

from __future__ import annotations

from typing import Final

from trl import GRPOConfig

from ...errors import SettingError
from ...messages import brief
from .. import refuse
from ..transformers import EVALUATE_ALONE, NO_EFFECT, changed, warn_of

#: Loss types that divide by trainable tokens, which TRL is told for the whole batch.
BY_TOKENS: Final = ("dapo", "cispo", "vespo")
#: Loss types that divide by rows, which TRL counts in a micro-batch.
BY_ROWS: Final = ("grpo", "dr_grpo", "sapo", "luspo")

_CORRECTION: Final = "the chain of the queue corrects for the sampler (`correction`)"
#: Would change what is trained on, and has no effect: setting -> where it is now.
ELSEWHERE: Final = {
    "mask_truncated_completions": "the queue's chain does that, chain={..., 'masks': {'truncated': True}}",
    "multi_objective_aggregation": "advantages come from the queue's chain: give queue_for chain='trl/gdpo', with "
    "named rewards in the push",
    "scale_rewards": "advantages come from the queue's chain: give queue_for another one, such as "
    "chain='trl/grpo_none'",
    "shuffle_dataset": "producers choose the prompts, and their order",
    "vllm_importance_sampling_cap": _CORRECTION,
    "vllm_importance_sampling_clip_max": _CORRECTION,
    "vllm_importance_sampling_clip_min": _CORRECTION,
    "vllm_importance_sampling_correction": _CORRECTION,
    "vllm_importance_sampling_mode": _CORRECTION,
}
#: How completions are sampled and shown: of `evaluate` alone.
OF_EVALUATE: Final = (
    *("cache_implementation", "chat_template_kwargs", "ds3_gather_for_generation", "generation_kwargs"),
    *("log_completions", "log_completions_hub_repo", "log_multimodal", "log_unique_prompts"),
    *("max_tool_calling_iterations", "min_p", "num_completions_to_print", "num_generations_eval"),
    *("repetition_penalty", "top_k", "top_p", "transformers_continuous_batching_config"),
    *("use_transformers_continuous_batching", "use_transformers_paged"),
)
#: Has no effect, and changes nothing that is learnt, or TRL wants it for its own arithmetic. Those that every Trainer
#: has and no queue: `streamadv.integrations.transformers`.
WITHOUT_EFFECT: Final = (
    *("average_tokens_across_devices", "label_names", "label_smoothing_factor", "num_generations"),
    *("vllm_enable_sleep_mode", "vllm_gpu_memory_utilization"),
    *("vllm_group_port", "vllm_max_model_length", "vllm_mode", "vllm_model_impl", "vllm_server_base_url"),
    *("vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_structured_outputs_regex"),
    "vllm_tensor_parallel_size",
)


def check_config(args: GRPOConfig, evaluates: bool) -> None:
    """Raise SettingError for a loss without an exact value, and settings that cannot hold for a queue.

    evaluates: whether there is an `eval_dataset`. Settings without an effect that do no harm are named in a warning.
    """
    _check_loss(args)
    refuse(
        args.num_iterations != 1,
        f"num_iterations is {args.num_iterations}: a batch of the queue is one step, set it to 1",
    )
    refuse(
        args.steps_per_generation != args.gradient_accumulation_steps,
        f"steps_per_generation is {args.steps_per_generation}: a batch of the queue is one step, leave it and "
        "generation_batch_size out",
    )
    refuse(args.use_vllm, "use_vllm is set: producers ask their engines themselves, leave it out")
    elsewhere, sampling = changed(args, ELSEWHERE), changed(args, OF_EVALUATE)
    for name, value in elsewhere.items():
        raise SettingError(f"{name} is {brief(value)}: {ELSEWHERE[name]}; leave it out")
    for name, value in sampling.items():
        refuse(
            not evaluates,
            f"{name} is {brief(value)}: producers generate, so it has no effect without an eval_dataset; set it where "
            "they sample, and leave it out",
        )
    warn_of(args, NO_EFFECT, changed(args, WITHOUT_EFFECT))
    warn_of(args, f"{EVALUATE_ALONE}, producers generate", sampling)
    if args.pad_to_multiple_of is not None:  # TRL has made a number or None of its default, "auto"
        warn_of(args, EVALUATE_ALONE if evaluates else NO_EFFECT, ["pad_to_multiple_of"])


def _check_loss(args: GRPOConfig) -> None:
    exact = (*BY_TOKENS, *BY_ROWS)
    refuse(
        args.loss_type == "bnpo",
        "loss_type is bnpo: it divides by the trainable tokens of each micro-batch, so it depends on how a "
        "batch is cut; loss_type='dapo' divides by those of the batch",
    )
    refuse(
        args.loss_type not in exact,
        f"loss_type is {args.loss_type}: not known to be exact, use one of {', '.join(exact)}",
    )
    refuse(
        args.top_entropy_quantile < 1.0,
        f"top_entropy_quantile is {args.top_entropy_quantile}: TRL takes the quantile of each micro-batch, so "
        "it depends on how a batch is cut; set it to 1",
    )
    refuse(
        args.entropy_coef or args.use_adaptive_entropy,
        "entropy_coef or use_adaptive_entropy is set: TRL takes the mean entropy of each micro-batch, so it "
        "depends on how a batch is cut; leave both out",
    )
