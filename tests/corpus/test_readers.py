"""Documents on disk become text; what cannot be read says so and stops nothing else."""

from pathlib import Path

import pytest
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from semkv_rag.corpus import find_files, read_document
from semkv_rag.errors import CorpusError


def write_pdf(path: Path, *pages: str, password: str | None = None) -> Path:
    """A PDF with one line of text on each page; without pages' text, blank ones."""
    writer = PdfWriter()
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    for text in pages:
        page = writer.add_blank_page(width=300, height=300)
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode())
        page[NameObject("/Contents")] = writer._add_object(stream)
        page[NameObject("/Resources")] = DictionaryObject(
            {NameObject("/Font"): DictionaryObject({NameObject("/F1"): font})}
        )
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    writer.write(path)
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_text_in_each_unicode_encoding(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_text("Zürich – 漢字", encoding=encoding)
    assert read_document(tmp_path / "a.txt") == "Zürich – 漢字"


def test_markdown_is_kept_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "A.MD").write_text("# Title\n\n* one\n")
    assert read_document(tmp_path / "A.MD") == "# Title\n\n* one\n"


def test_html_gives_what_a_reader_sees(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        """<!doctype html><html><head><title>Pumps</title><style>p {color: red}</style>
        <script>var hidden = 1</script></head><body><!-- not this -->
        <h1>The   pump</h1><p>It is <b>very</b>
        loud&nbsp;&amp; old.</p><ul><li>one</li><li>two</li></ul>
        <table><tr><td>a</td><td>b</td></tr><tr><td>c</td><td>d</td></tr></table>
        <pre>x = 1
  y = 2</pre></body></html>"""
    )
    text = read_document(tmp_path / "a.html").replace("\xa0", " ")
    assert text == (
        "Pumps\n\nThe pump\n\nIt is very loud & old.\n\none\ntwo\n\na b\nc d\n\nx = 1\n  y = 2"
    )


def test_html_in_its_declared_encoding(tmp_path: Path) -> None:
    page = '<html><head><meta charset="iso-8859-1"></head><body>Zürich</body></html>'
    (tmp_path / "a.htm").write_bytes(page.encode("iso-8859-1"))
    assert read_document(tmp_path / "a.htm") == "Zürich"


def test_pdf_pages_are_set_apart(tmp_path: Path) -> None:
    path = write_pdf(tmp_path / "a.pdf", "Page one .", "Page two .")
    assert read_document(path) == "Page one .\n\nPage two ."


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("latin.txt", "Zürich".encode("latin-1"), "not UTF-8"),
        ("binary.txt", b"a\0b", "NUL"),
        ("broken.pdf", b"%PDF-1.7\nnothing of the kind", "PDF"),
        ("empty.pdf", b"", "PDF"),
        ("sheet.xlsx", b"x", r"\.xlsx is not read"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=says):
        read_document(tmp_path / name)


def test_a_locked_and_a_scanned_pdf_say_why(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="locked"):
        read_document(write_pdf(tmp_path / "locked.pdf", "secret", password="p"))
    with pytest.raises(CorpusError, match="scanned"):
        read_document(write_pdf(tmp_path / "blank.pdf", ""))


def test_a_file_that_went_away_says_so(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="No such file"):
        read_document(tmp_path / "gone.txt")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "manuals"
    for name in ("b.txt", "a.md", "sub/z.html", "sub/.hidden.txt", ".git/x.txt", "sub/pic.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("text")
    (root / "loop").symlink_to(root)
    return root


def test_a_folder_is_walked_sorted_and_without_hidden_files(folder: Path) -> None:
    found = find_files([folder])
    assert [file.name for file in found.documents] == [
        "manuals/a.md",
        "manuals/b.txt",
        "manuals/sub/z.html",
    ]
    assert found.skipped == ("manuals/sub/pic.png",)
    assert found.folders == ("manuals/",)


def test_names_do_not_depend_on_where_one_stands(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absolute = [file.name for file in find_files([folder]).documents]
    monkeypatch.chdir(folder)
    assert [file.name for file in find_files([Path()]).documents] == absolute
    monkeypatch.chdir(folder.parent)
    assert [file.name for file in find_files([Path("manuals/")]).documents] == absolute


def test_a_file_given_itself_has_its_own_name_and_is_taken_once(folder: Path) -> None:
    found = find_files([folder / "b.txt", folder / "b.txt"])
    assert [file.name for file in found.documents] == ["b.txt"]
    assert found.folders == ()


def test_paths_that_cannot_be_used_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="does not exist"):
        find_files([tmp_path / "nowhere"])
    with pytest.raises(CorpusError, match="cannot be read"):
        find_files([folder / "sub/pic.png"])


def test_two_documents_never_share_a_name(tmp_path: Path) -> None:
    for parent in ("x", "y"):
        (tmp_path / parent / "docs").mkdir(parents=True)
        (tmp_path / parent / "docs" / "a.txt").write_text(parent)
    with pytest.raises(CorpusError, match=r"both be called docs/a\.txt"):
        find_files([tmp_path / "x/docs", tmp_path / "y/docs"])
