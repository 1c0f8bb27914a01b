"""A config.json becomes the workload of its task, as its class says, with batches that its model trains on."""

import json
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from transformers import CONFIG_MAPPING

from autofit.core.errors import InputError
from autofit.core.tasks import TASK_NAMES
from autofit.core.workload import Workload
from autofit.data.batch import sample_count, split
from autofit.data.counts import loss_count
from autofit.models import resolve

TEXT = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
PREFERENCES = dict.fromkeys(("input_ids", "attention_mask", "labels"), (2, 2, 8))
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
ENCODER_DECODER = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "vocab_size": 300,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
    "eos_token_id": 2,
    "bos_token_id": 0,
}
SPEECH = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_labels": 5,
    "conv_dim": [8] * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 32,
}
MROPE = {
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
}
TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
}
MARKS = {
    "image_token_id": 299,
    "video_token_id": 298,
    "vision_start_token_id": 297,
    "vision_end_token_id": 296,
}
GEMMA3 = {
    "text_config": {**TEXT, "model_type": "gemma3_text"},
    "vision_config": {**VISION, "model_type": "siglip_vision_model"},
    "mm_tokens_per_image": 4,
    "image_token_index": 299,
    "boi_token_index": 297,
    "eoi_token_index": 298,
}
QWEN = {
    "text_config": {**TEXT, **MROPE},
    "vision_config": {**TOWER, "fullatt_block_indexes": [0]},
    **MARKS,
}
SMOL = {
    "text_config": {**TEXT, "model_type": "llama"},
    "vision_config": VISION,
    "scale_factor": 2,
    "image_token_id": 299,
}
BERT = {"model_type": "bert", **TEXT}
CANINE = {key: value for key, value in TEXT.items() if key != "vocab_size"}

# What a class is trained for, and the shapes of two samples: (model_type, class, config, --task, length), task, shapes
Family = tuple[str, str, dict[str, Any], str | None, int | None]
READER: Family = (
    "vision-encoder-decoder",
    "VisionEncoderDecoderModel",
    {
        "encoder": {**VISION, "model_type": "vit", "patch_size": 14},
        "decoder": {**ENCODER_DECODER, "model_type": "trocr"},
        "pad_token_id": 1,
    },
    "image-text-to-text",
    8,
)
FAMILIES: list[tuple[Family, str, dict[str, tuple[int, ...]]]] = [
    (("t5", "T5ForConditionalGeneration",
      {"d_model": 32, "d_ff": 32, "d_kv": 16, "num_heads": 2, "num_layers": 1, "vocab_size": 300}, None, 8),
     "seq2seq", {"input_ids": (2, 8), "labels": (2, 8)}),
    (("bart", "BartForConditionalGeneration", ENCODER_DECODER, None, 8),
     "seq2seq", {"input_ids": (2, 8), "labels": (2, 8)}),
    (("whisper", "WhisperForConditionalGeneration",
      {**ENCODER_DECODER, "num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 40}, None, 8),
     "speech-seq2seq", {"input_features": (2, 16, 100), "labels": (2, 8)}),
    (("wav2vec2", "Wav2Vec2ForCTC", SPEECH, None, None), "ctc", {"input_values": (2, 160000), "labels": (2, 80)}),
    (("parakeet_ctc", "ParakeetForCTC",
      {"vocab_size": 300, "pad_token_id": 0,
       "encoder_config": {**VISION, "num_mel_bins": 16, "subsampling_conv_channels": 8}}, None, None),
     "ctc", {"input_features": (2, 1000, 16), "attention_mask": (2, 1000), "labels": (2, 80)}),
    (("granite_speech5_ctc", "GraniteSpeech5ForCTC",
      {"vocab_size": 300, "pad_token_id": 0,
       "encoder_config": {**VISION, "vocab_size": 300, "num_mel_bins": 16, "context_size": 8}}, None, None),
     "ctc", {"input_features": (2, 500, 64), "attention_mask": (2, 500), "labels": (2, 80)}),
    (("pop2piano", "Pop2PianoForConditionalGeneration",
      {"d_model": 32, "d_ff": 32, "d_kv": 16, "num_heads": 2, "num_layers": 1, "vocab_size": 300}, None, 8),
     "speech-seq2seq", {"input_features": (2, 1000, 32), "labels": (2, 8)}),
    (("hubert", "HubertForSequenceClassification", SPEECH, None, None),
     "audio-classification", {"input_values": (2, 160000), "labels": (2,)}),
    (("audio-spectrogram-transformer", "ASTForAudioClassification",
      {**VISION, "num_mel_bins": 32, "max_length": 64, "patch_size": 16}, None, None),
     "audio-classification", {"input_values": (2, 64, 32), "labels": (2,)}),
    (("bert", "BertForMaskedLM", TEXT, None, 8), "masked-lm", {"input_ids": (2, 8), "labels": (2, 8)}),
    (("bert", "BertForTokenClassification", TEXT, None, 8),
     "token-classification", {"input_ids": (2, 8), "labels": (2, 8)}),
    (("bros", "BrosForTokenClassification", {**TEXT, "hidden_size": 64}, None, 8),
     "token-classification", {"input_ids": (2, 8), "labels": (2, 8), "bbox": (2, 8, 4)}),
    (("canine", "CanineForSequenceClassification", {**CANINE, "num_hash_buckets": 64, "downsampling_rate": 4}, None, 8),
     "sequence-classification", {"input_ids": (2, 8), "labels": (2,)}),
    (("bert", "BertForQuestionAnswering", TEXT, None, 8),
     "question-answering", {"input_ids": (2, 8), "start_positions": (2,), "end_positions": (2,)}),
    (("lxmert", "LxmertForQuestionAnswering",
      {**TEXT, "l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 16, "num_qa_labels": 5}, None, 8),
     "question-answering",
     {"input_ids": (2, 8), "labels": (2,), "visual_feats": (2, 36, 16), "visual_pos": (2, 36, 4)}),
    (("bert", "BertModel", TEXT, "embed", 8), "embed", {"input_ids": (2, 2, 8)}),
    *((("llama", "LlamaForCausalLM", TEXT, task, 8), task, PREFERENCES) for task in ("simpo", "orpo")),
    (("llama", "LlamaForCausalLM", TEXT, "grpo", 8), "grpo",
     {"input_ids": (2, 8), "attention_mask": (2, 8), "labels": (2, 8), "advantages": (2,), "old": (2, 4)}),
    *((("llama", "LlamaForCausalLM", TEXT, task, 8), task, PREFERENCES | {"reference": (2, 2)} | more)
      for task, more in (("dpo", {}), ("kto", {"desirable": (2,)}))),
    (("llama", "LlamaForCausalLM", TEXT, "reward", 8), "reward", PREFERENCES),
    (("bert", "BertModel", TEXT, "rerank", 8), "rerank", {"input_ids": (2, 8), "labels": (2,)}),
    (("llama", "LlamaForCausalLM", TEXT, "generative-rerank", 8), "generative-rerank",
     {"input_ids": (2, 8), "labels": (2,)}),
    (("segformer", "SegformerForSemanticSegmentation",
      {"hidden_sizes": [16, 16, 16, 16], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16, "image_size": 64,
       "num_attention_heads": [1, 1, 1, 1]}, None, None),
     "semantic-segmentation", {"pixel_values": (2, 3, 64, 64), "labels": (2, 64, 64)}),
    (("imagegpt", "ImageGPTForImageClassification",
      {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}, None, None),
     "image-classification", {"input_ids": (2, 16), "labels": (2,)}),
    (("siglip2", "Siglip2ForImageClassification",
      {"vision_config": {**VISION, "num_patches": 16, "num_labels": 3}, "text_config": TEXT}, None, None),
     "image-classification",
     {"pixel_values": (2, 16, 588), "pixel_attention_mask": (2, 16), "spatial_shapes": (2, 2), "labels": (2,)}),
    (("videomae", "VideoMAEForVideoClassification", {**VISION, "image_size": 32, "patch_size": 16, "num_frames": 4},
      None, None), "video-classification", {"pixel_values": (2, 4, 3, 32, 32), "labels": (2,)}),
    (("yolos", "YolosForObjectDetection",
      {**VISION, "image_size": [64, 64], "patch_size": 16, "num_detection_tokens": 10}, None, None),
     "object-detection", {"pixel_values": (2, 3, 64, 64)}),
    (("rf_detr", "RfDetrForObjectDetection",
      {"d_model": 32, "decoder_layers": 1, "decoder_ffn_dim": 32, "decoder_self_attention_heads": 2, "num_queries": 4,
       "decoder_cross_attention_heads": 2, "group_detr": 2,
       "backbone_config": {**VISION, "model_type": "rf_detr_dinov2", "num_windows": 4, "out_indices": [1]}},
      None, None), "object-detection", {"pixel_values": (2, 3, 616, 616)}),
    (("git", "GitForCausalLM", {**TEXT, "vision_config": VISION}, None, 8),
     "image-text-to-text", {"input_ids": (2, 8), "labels": (2, 8), "pixel_values": (2, 3, 56, 56)}),
    (("gemma3", "Gemma3ForConditionalGeneration", GEMMA3, None, 8),
     "causal-lm", {"input_ids": (2, 8), "labels": (2, 8), "token_type_ids": (2, 8)}),
    (("gemma3", "Gemma3ForConditionalGeneration", GEMMA3, "image-text-to-text", 16),
     "image-text-to-text",
     {"input_ids": (2, 16), "labels": (2, 16), "token_type_ids": (2, 16), "pixel_values": (2, 3, 56, 56)}),
    (("blip", "BlipForConditionalGeneration",
      {"text_config": TEXT, "vision_config": VISION, "image_text_hidden_size": 32}, "image-text-to-text", 8),
     "image-text-to-text", {"input_ids": (2, 8), "labels": (2, 8), "pixel_values": (2, 3, 56, 56)}),
    (("blip-2", "Blip2ForConditionalGeneration",
      {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": VISION, "num_query_tokens": 4,
       "image_token_index": 299, "qformer_config": {**TEXT, "encoder_hidden_size": 32}}, "image-text-to-text", 8),
     "image-text-to-text", {"input_ids": (2, 8), "labels": (2, 8), "pixel_values": (2, 3, 56, 56)}),
    (("instructblip", "InstructBlipForConditionalGeneration",
      {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": VISION, "num_query_tokens": 4,
       "image_token_index": 299, "qformer_config": {**TEXT, "encoder_hidden_size": 32}}, None, 8),
     "image-text-to-text",
     {"input_ids": (2, 8), "labels": (2, 8), "qformer_input_ids": (2, 8), "pixel_values": (2, 3, 56, 56)}),
    (("instructblipvideo", "InstructBlipVideoForConditionalGeneration",
      {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": VISION, "num_query_tokens": 1,
       "video_token_index": 299, "qformer_config": {**TEXT, "encoder_hidden_size": 32}}, None, 8),
     "image-text-to-text",
     {"input_ids": (2, 8), "labels": (2, 8), "qformer_input_ids": (2, 8), "pixel_values": (2, 4, 3, 56, 56)}),
    (("idefics", "IdeficsForVisionText2Text",
      {**TEXT, "cross_layer_interval": 1, "use_resampler": False, "additional_vocab_size": 0,
       "vision_config": {**VISION, "embed_dim": 32, "num_attention_heads": 2}}, None, 8),
     "image-text-to-text",
     {"input_ids": (2, 8), "labels": (2, 8), "image_attention_mask": (2, 8, 1), "pixel_values": (2, 1, 3, 56, 56)}),
    (("pp_formulanet", "PPFormulaNetForConditionalGeneration",
      {"text_config": {**ENCODER_DECODER}, "is_encoder_decoder": True,
       "vision_config": {**VISION, "mlp_dim": 32, "image_size": 64, "patch_size": 16, "output_channels": 16,
                         "global_attn_indexes": [0], "post_conv_in_channels": 16, "post_conv_mid_channels": 16,
                         "post_conv_out_channels": 16, "decoder_hidden_size": 32}}, None, 8),
     "image-text-to-text", {"input_ids": (2, 8), "labels": (2, 8), "pixel_values": (2, 3, 64, 64)}),
    (("kyutai_speech_to_text", "KyutaiSpeechToTextForConditionalGeneration",
      {**TEXT, "num_codebooks": 3, "codebook_vocab_size": 20, "audio_pad_token_id": 300, "bos_token_id": 1,
       "audio_bos_token_id": 2, "ffn_dim": 32, "codec_config":
       {"model_type": "mimi", "hidden_size": 32, "num_filters": 2, "upsample_groups": 32, "num_hidden_layers": 1,
        "intermediate_size": 32, "codebook_dim": 8, "codebook_size": 16, "vector_quantization_hidden_dimension": 8,
        "num_quantizers": 3, "num_attention_heads": 2, "num_key_value_heads": 2}}, None, 8),
     "causal-lm", {"input_ids": (2, 8, 4), "labels": (2, 8)}),
    (("voxtral_realtime", "VoxtralRealtimeForConditionalGeneration",
      {"text_config": {**TEXT, "model_type": "voxtral_realtime_text"}, "hidden_size": 32,
       "audio_config": {**TEXT, "num_mel_bins": 16, "sliding_window": 16, "vocab_size": 16}}, None, 8),
     "causal-lm", {"input_ids": (2, 8), "labels": (2, 8), "input_features": (2, 16, 64)}),
    (("kosmos-2", "Kosmos2ForConditionalGeneration",
      {"text_config": {"vocab_size": 300, "embed_dim": 32, "layers": 1, "ffn_dim": 32, "attention_heads": 2},
       "vision_config": VISION, "latent_query_num": 4}, None, 8),
     "image-text-to-text",
     {"input_ids": (2, 8), "labels": (2, 8), "image_embeds_position_mask": (2, 8), "pixel_values": (2, 3, 56, 56)}),
    (READER, "image-text-to-text", {"labels": (2, 8), "pixel_values": (2, 3, 56, 56)}),
    (("pix2struct", "Pix2StructForConditionalGeneration",
      {"text_config": {"vocab_size": 300, "hidden_size": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2},
       "vision_config": {"hidden_size": 32, "patch_embed_hidden_size": 48, "d_ff": 32, "d_kv": 16,
                         "num_hidden_layers": 1, "num_attention_heads": 2}}, None, 8),
     "image-text-to-text", {"flattened_patches": (2, 2048, 50), "labels": (2, 8)}),
    (("udop", "UdopForConditionalGeneration",
      {"d_model": 32, "d_ff": 32, "d_kv": 16, "num_heads": 2, "num_layers": 1, "vocab_size": 300}, None, 8),
     "seq2seq", {"input_ids": (2, 8), "labels": (2, 8), "bbox": (2, 8, 4)}),
    (("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", QWEN, "image-text-to-text", 264),
     "image-text-to-text",
     {"input_ids": (2, 264), "labels": (2, 264), "mm_token_type_ids": (2, 264), "pixel_values": (2048, 1176),
      "image_grid_thw": (2, 3)}),
    (("smolvlm", "SmolVLMForConditionalGeneration", SMOL, "image-text-to-text", 16),
     "image-text-to-text", {"input_ids": (2, 16), "labels": (2, 16), "pixel_values": (2, 1, 3, 56, 56)}),
]  # fmt: skip


def workload(directory: Path, family: Family) -> Workload:
    kind, name, config, task, length = family
    (directory / "config.json").write_text(
        json.dumps({"model_type": kind, "architectures": [name], **config})
    )
    return resolve(str(directory), task=task, sequence_length=length, effective_batch_size=4)


@pytest.mark.parametrize(
    ("family", "task", "shapes"), FAMILIES, ids=[f"{each[0][1]}-{each[1]}" for each in FAMILIES]
)
def test_a_class_is_trained_for_its_task(
    tmp_path: Path, family: Family, task: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    if family[0] not in CONFIG_MAPPING:
        pytest.skip(f"this transformers is older than {family[0]}")
    made = cloudpickle.loads(cloudpickle.dumps(workload(tmp_path, family)))
    assert made.task == task
    batch = made.batch(2)
    assert {
        name: tuple(each.shape) for name, each in batch.items() if isinstance(each, torch.Tensor)
    } == shapes
    torch.manual_seed(0)
    model = made.model()
    loss = loss_of(made, model, batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert sum(each.grad is not None for each in model.parameters()) > 1
    assert [sample_count(part) for part in split(made.batch(3), 2)] == [2, 1]
    assert loss_count(made, batch) > 0


def loss_of(made: Workload, model: Any, batch: Any) -> torch.Tensor:
    """The loss of a batch, with the model itself as the one before training."""
    if made.loss is None:
        return model(**batch).loss  # type: ignore[no-any-return]
    models = {"model": model, **dict.fromkeys(made.frozen, model)} if made.frozen else model
    if not hasattr(made.loss, "over_batch"):
        return made.loss(models, batch)  # type: ignore[no-any-return]
    return made.loss(models, batch, made.loss.over_batch(models, batch))  # type: ignore[call-arg, no-any-return]


def test_what_is_more_than_text_is_trained_on_text_unless_asked(tmp_path: Path) -> None:
    note = f"{tmp_path.name} takes more than text, and is trained here on text alone; "
    family = ("gemma3", "Gemma3ForConditionalGeneration", GEMMA3, None, 16)
    assert workload(tmp_path, family).notes == (
        note + "--task image-text-to-text trains it on images, too.",
    )
    assert workload(tmp_path, (*family[:3], "image-text-to-text", 16)).notes == ()


def test_the_loss_of_an_image_text_model_leaves_its_image_out(tmp_path: Path) -> None:
    family = ("gemma3", "Gemma3ForConditionalGeneration", GEMMA3, "image-text-to-text", 16)
    made = workload(tmp_path, family)
    # four tokens of the image, between two marks
    assert loss_count(made, made.batch(3)) == 3 * (16 - 6)


def test_the_loss_of_what_is_read_in_an_image_counts_every_token(tmp_path: Path) -> None:
    made = workload(tmp_path, READER)
    assert loss_count(made, made.batch(3)) == 3 * 8


def test_a_ctc_loss_is_reduced_as_its_config_says(tmp_path: Path) -> None:
    family = ("wav2vec2", "Wav2Vec2ForCTC", SPEECH, None, None)
    assert workload(tmp_path, family).reduction == "sum"
    mean = workload(tmp_path, (*family[:2], {**SPEECH, "ctc_loss_reduction": "mean"}, None, None))
    assert mean.reduction == "mean"
    assert loss_count(mean, mean.batch(3)) == 3


def test_pairs_are_told_apart_by_their_loss(tmp_path: Path) -> None:
    made = workload(tmp_path, ("bert", "BertModel", TEXT, "embed", 8))
    assert made.loss is not None
    ids = made.batch(3)["input_ids"]
    model = made.model().eval()
    same = {"input_ids": ids[:, :1].expand(-1, 2, -1)}  # both texts of a pair are one
    assert made.loss(model, same) < made.loss(
        model, {"input_ids": torch.cat([ids[:, :1], ids.roll(1, 0)[:, :1]], 1)}
    )


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (("bert", "BertModel", TEXT, "speech-seq2seq", None),
         "config.json is of bert, which transformers has no model of for speech-seq2seq. Say what to train it for, "
         "--task causal-lm, masked-lm, sequence-classification, token-classification, question-answering, embed."),
        (("gemma3", "Gemma3ForConditionalGeneration", GEMMA3, "seq2seq", None),
         "config.json is of gemma3, which transformers has no model of for seq2seq. Say what to train it for, --task "
         "causal-lm, sequence-classification, image-text-to-text, embed."),
        (("bert", "BertModel", TEXT, "seq-2-seq", None), "unknown task 'seq-2-seq'. Did you mean 'seq2seq'?"),
        (("bert", "BertModel", TEXT, "custom", None), "unknown task 'custom'."),
        (("hubert", "HubertForCTC", SPEECH, None, 32), "is trained on sound, which have no sequence length."),
        (("gemma3", "Gemma3ForConditionalGeneration", GEMMA3, "image-text-to-text", 6),
         "takes 4 tokens, and the sequence length is 6. Give at least 8."),
        (("gemma3", "Gemma3ForConditionalGeneration", {**GEMMA3, "image_token_index": 999}, "image-text-to-text", 16),
         "must be from 0 to below vocab_size 300, not 999."),
        (("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", {**QWEN, "image_token_id": -3}, "image-text-to-text",
          264),
         "must be from 0 to below vocab_size 300, not -3."),
        (("videomae", "VideoMAEForVideoClassification", {**VISION, "num_frames": 10**12}, None, None),
         "num_frames cannot be 1000000000000. Correct it."),
        (("fuyu", "FuyuForCausalLM", {}, "image-text-to-text", 16),
         "autofit knows no batches of images and text for"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_one_sentence(
    tmp_path: Path, family: Family, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        workload(tmp_path, family)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_preset_is_trained_for_another_task_when_asked() -> None:
    assert (
        resolve("bert-base", task="token-classification", sequence_length=8).task
        == "token-classification"
    )
    with pytest.raises(
        InputError,
        match="the preset tiny-llama is of llama, which transformers has no model of for ctc",
    ):
        resolve("tiny-llama", task="ctc")


def test_every_task_has_its_batches() -> None:
    # of a teacher, too: tests/training/test_losses_of_whole_batches.py; of diffusers, which are no
    # models of transformers: tests/models/diffusion
    assert {task for _, task, _ in FAMILIES} == {*TASK_NAMES} - {"distill", "diffusion"}
