#!/bin/bash
# Preferences, beside a reference that is the model without its adapters.
trl dpo \
    --model_name_or_path Qwen/Qwen3-0.6B \
    --dataset_name trl-lib/ultrafeedback_binarized \
    --max_length 1024 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --gradient_checkpointing \
    --learning_rate 5.0e-6 \
    --use_peft --lora_r 32 --lora_alpha 16 \
    --logging_steps 25 \
    --output_dir Qwen3-DPO
