"""Sound for models of speech, made here."""

import math
import struct
import wave
from pathlib import Path


def tone(
    file: Path, hertz: float, *, seconds: float = 0.2, rate: int = 16_000, channels: int = 1
) -> Path:
    """A WAV file of a tone."""
    values = [
        int(20_000 * math.sin(2 * math.pi * hertz * step / rate))
        for step in range(int(seconds * rate))
    ]
    with wave.open(str(file), "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(b"".join(struct.pack("<h", value) * channels for value in values))
    return file
