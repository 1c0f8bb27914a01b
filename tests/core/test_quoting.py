"""Text from outside in each language: read back by that language's own parser it is one string, or nothing at all."""

import ast
import html.parser
import io
import shlex
import subprocess
import tokenize
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings

from autofit.core import quoting
from autofit.core.strict_yaml import dump, parse
from tests.hostile import EVERYTHING, HOSTILE, MARKDOWN, TEXTS

EACH = settings(max_examples=60, deadline=None)


@EACH
@given(TEXTS)
@example(EVERYTHING)
def test_it_moves_no_cursor(text: str) -> None:
    assert quoting.printed(text).isprintable()
    assert quoting.one_line(text) == " ".join(quoting.printed(text).split())


def test_escapes_go_and_words_stay() -> None:
    told = "\x1b[31mred\x1b[0m, a \x1b]0;title\x07bell\x07 and\ta \x9b1mC1\r\x1b[2K \u6a21 [bold]"
    assert quoting.one_line(told) == "red, a bell and a C1 \u6a21 [bold]"


@EACH
@given(TEXTS)
@example(EVERYTHING)
def test_a_comment_is_one(text: str) -> None:
    comment = quoting.comment([text, "b"])
    assert ast.parse(comment).body == []
    assert parse(comment, "a comment") is None
    kinds = {token.type for token in tokenize.generate_tokens(io.StringIO(comment).readline)}
    assert kinds <= {tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER}


@EACH
@given(TEXTS)
@example(EVERYTHING)
def test_a_docstring_is_one(text: str) -> None:
    (statement,) = ast.parse(f'"""\n{quoting.docstring(text)}\n"""\n').body
    assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


@EACH
@given(TEXTS)
@example(EVERYTHING)
def test_a_python_string_is_that_text_on_one_line(text: str) -> None:
    source = quoting.python_string(text)
    assert ast.literal_eval(source) == text
    assert source.isprintable()


@EACH
@given(TEXTS)
@example(EVERYTHING)
def test_yaml_holds_that_text_whoever_reads_it(text: str) -> None:
    written = dump({text: [text]})
    assert parse(written, "a file") == {text: [text]}
    assert not set("\r\x85\u2028\u2029") & set(written)


def test_a_word_of_a_shell_is_that_text() -> None:
    texts = [each for each in HOSTILE if "\0" not in each and each != "\ud800"]
    texts += [
        "a b",
        "-x",
        "--a --b",
        'it\'s "so"',
        "$(touch x)",
        "`x`",
        "~",
        "*",
        "a\nb\x1b[2J\u2028",
        "\udcff",
        "",
    ]
    words = [quoting.shell_word(text) for text in texts]
    assert all(word.isprintable() for word in words)
    script = f"printf '%s\\0' {' '.join(words)}"
    read = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout
    assert read.decode(errors="surrogateescape").split("\0")[:-1] == texts


@EACH
@given(TEXTS.filter(str.isprintable))
def test_a_printable_word_of_a_shell_needs_no_bash(text: str) -> None:
    assert shlex.split(quoting.shell_word(text)) == [text]


@pytest.mark.parametrize(
    ("path", "word"), [("-x/a.yaml", "./-x/a.yaml"), ("a b", "'a b'"), ("x", "x")]
)
def test_a_path_is_no_option(path: str, word: str) -> None:
    assert quoting.shell_path(path) == word


@EACH
@given(TEXTS)
@example(EVERYTHING)
def test_xml_can_hold_it(text: str) -> None:
    element = ElementTree.Element("a", {"b": quoting.xml_text(text)})
    element.text = quoting.xml_text(text)
    read = ElementTree.fromstring(ElementTree.tostring(element, encoding="unicode"))
    assert not list(read) and set(read.attrib) == {"b"}


class _Words(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words += data


@EACH
@given(TEXTS)
@example(EVERYTHING)
def test_html_shows_it(text: str) -> None:
    reader = _Words()
    reader.feed(f"<p>{quoting.html_text(text)}</p>")
    reader.close()
    assert reader.tags == ["p"]
    assert reader.words == quoting.xml_text(text)


@EACH
@given(TEXTS.filter(str.strip))
def test_markdown_shows_it(text: str) -> None:
    line = quoting.one_line(text)
    tokens = MARKDOWN.parse(quoting.markdown_text(text) + "\n")
    if not line:
        return
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"]
    (shown,) = tokens[1].children or ()
    assert (shown.type, shown.content) == ("text", line)


@EACH
@given(TEXTS)
@example(EVERYTHING)
def test_a_block_of_code_ends_where_it_should(text: str) -> None:
    (fence,) = MARKDOWN.parse(quoting.markdown_code(text, "yaml") + "\n")
    assert (fence.type, fence.info) == ("fence", "yaml")
