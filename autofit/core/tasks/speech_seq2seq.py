"""speech-seq2seq: to write what is said, with an encoder of sound and a decoder of text."""

from autofit.core.task import Task

SPEECH_SEQ2SEQ = Task(
    name="speech-seq2seq",
    medium="sound",
    labels="other tokens",
    auto_classes=("AutoModelForSpeechSeq2Seq",),
    rows=(("audio", "transcript"),),
)
