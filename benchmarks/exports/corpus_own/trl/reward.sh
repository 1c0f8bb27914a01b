export CUDA_VISIBLE_DEVICES=0
trl reward --model_name_or_path Qwen/Qwen3-1.7B --dataset_name trl-lib/ultrafeedback_binarized \
  --per_device_train_batch_size 8 --max_length 2048 --learning_rate 1.0e-5 --center_rewards_coefficient 0.01 \
  --eval_strategy steps --eval_steps 50 --output_dir Qwen3-1.7B-Reward
