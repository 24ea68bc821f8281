"""Small PDFs, made by hand so that anything may be in them."""

from pathlib import Path


def pdf_with(path: Path, content: bytes, *, compressed: bool = False, extra: bytes = b"") -> Path:
    """Write a PDF of one page with this content stream."""
    filtered = b"/Filter /FlateDecode " if compressed else b""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 300] /Contents 4 0 R"
        b" /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< %s/Length %d >>\nstream\n%s\nendstream" % (filtered, len(content), content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica %s>>" % extra,
    ]
    data, places = b"%PDF-1.7\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(data)
    data += b"xref\n0 6\n0000000000 65535 f \n"
    data += b"".join(b"%010d 00000 n \n" % place for place in places)
    data += b"trailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % start
    path.write_bytes(data)
    return path
