# GRPO on GSM8K and MATH with Qwen2.5-7B, as scripts of verl's examples are written.
set -x

gsm8k_train_path=$DATA/gsm8k/train.parquet
gsm8k_test_path=$DATA/gsm8k/test.parquet
math_train_path=$DATA/math/train.parquet
math_test_path=$DATA/math/test.parquet

train_files="['$gsm8k_train_path', '$math_train_path']"
test_files="['$gsm8k_test_path', '$math_test_path']"

REWARD=(
    # 4 GPUs
    "custom_reward_function.path=my_reward.py"
    custom_reward_function.name=score
)

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$train_files" \
    data.val_files="$test_files" \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \
    actor_rollout_ref.model.lora_rank=64 \
    actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.model.target_modules="[q_proj,v_proj]" \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.actor.clip_ration=0.3 \
    algorithm.norm_adv_by_std_in_grpo=False \
    +algorithm.rollout_correction.rollout_is=token \
    +algorithm.rollout_correction.rollout_is_threshold=2.0 \
    +algorithm.rollout_correction.rollout_rs=token_k1 \
    +algorithm.rollout_correction.rollout_rs_threshold=0.5_4.0 \
    trainer.logger=['console'] \
    trainer.experiment_name='qwen2.5 7b' \
    trainer.n_gpus_per_node=4 \
    trainer.nnodes=1 \
    trainer.save_freq=20 \
    trainer.test_freq=-1 \
    trainer.total_epochs=15 "${REWARD[@]}" $@
