trl kto --model_name_or_path Qwen/Qwen2.5-1.5B-Instruct --dataset_name trl-lib/kto-mix-14k \
  --max_length 1024 --per_device_train_batch_size 4 --gradient_accumulation_steps 4 --bf16 true \
  --learning_rate 5e-7 --lr_scheduler_type cosine --warmup_steps 0.1 --output_dir kto-aligned-model
