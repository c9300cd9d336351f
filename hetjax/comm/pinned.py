# SPDX-License-Identifier: Apache-2.0
"""Opens encrypted streams to a side whose certificate fingerprint is known beforehand.

No certificate authority is needed. The called side makes its own certificate, and
people carry its fingerprint to the callers. A caller sends nothing before it has seen
that very certificate. Owns making the certificate, and the spelling of a fingerprint.
Does not own the stream (`tls.py`), nor how a caller proves who it is
(`launchers/joining/hello.py`).
"""

import datetime
import re
import ssl
import time
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path

from hetjax.comm.addresses import endpoint, socket_for
from hetjax.comm.tls import TlsStream, fingerprint_of
from hetjax.files.writing import write_whole

OWNER_ALONE = 0o600  # mode of files that only the owner may read
_SPELLED = re.compile(r"sha256:([0-9a-f]{64})")
_DAYS = 3650  # the fingerprint identifies it, not its age
_CERTIFICATE, _KEY = "certificate.pem", "key.pem"


class OtherCertificate(ConnectionError):
    """The called side's certificate does not have the known fingerprint."""

    def __init__(self, found: str) -> None:
        super().__init__(f"another certificate: {found}")
        self.found = found


@dataclass(frozen=True)
class OwnCertificate:
    """The called side: paths of a certificate and its key (PEM)."""

    cert: str
    key: str

    def context(self, is_called: bool) -> ssl.SSLContext:
        """Return a server context that requests no certificate from callers."""
        assert is_called
        found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        found.minimum_version = ssl.TLSVersion.TLSv1_3
        found.load_cert_chain(self.cert, self.key)
        return found

    @property
    def fingerprint(self) -> bytes:
        return fingerprint_of(Path(self.cert).read_text())


@dataclass(frozen=True)
class _Caller:
    """The calling side, which shows no certificate."""

    fingerprint: bytes = sha256(b"").digest()

    def context(self, is_called: bool) -> ssl.SSLContext:
        """Return a client context; TLS proves that the other side has its key."""
        assert not is_called
        found = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        found.minimum_version = ssl.TLSVersion.TLSv1_3
        found.check_hostname = False
        found.verify_mode = ssl.CERT_NONE  # the fingerprint is compared instead
        return found


def dial_pinned(address: str, fingerprint: bytes, end_s: float) -> TlsStream:
    """Connect to the address and require the certificate with this fingerprint.

    Raises OSError, at the monotonic time `end_s` at the latest: OtherCertificate before
    anything was sent, ssl.SSLError if the other side does not speak TLS.
    """
    found = socket_for(address)
    try:
        found.settimeout(max(0.001, end_s - time.monotonic()))
        found.connect(endpoint(address))
        stream = TlsStream(found, _Caller(), is_called=False, end_s=end_s)
        theirs = stream.binding[len(fingerprint) :]
        if not compare_digest(theirs, fingerprint):
            raise OtherCertificate(spelled(theirs))
        return stream
    except BaseException:
        found.close()
        raise


def kept_certificate(folder: Path) -> OwnCertificate:
    """Return the certificate in a folder only the owner can read; make it if missing.

    Raises OSError, or ValueError if the files are not a certificate and its key.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    cert, key = folder / _CERTIFICATE, folder / _KEY
    found = OwnCertificate(str(cert), str(key))
    if not (cert.exists() and key.exists()):
        cert_pem, key_pem = _made()
        write_whole(key, key_pem, OWNER_ALONE)
        write_whole(cert, cert_pem, OWNER_ALONE)
    found.context(is_called=True)
    return found


def spelled(fingerprint: bytes) -> str:
    """Return a fingerprint as people carry it.

    >>> spelled(bytes(32))[:12]
    'sha256:00000'
    """
    return f"sha256:{fingerprint.hex()}"


def read_fingerprint(text: str) -> bytes:
    """Inverse of `spelled`; raise ValueError for any other text."""
    found = _SPELLED.fullmatch(text)
    if found is None:
        raise ValueError("sha256: followed by 64 hexadecimal digits")
    return bytes.fromhex(found[1])


def _made() -> tuple[str, str]:
    """Return a new certificate and its key, as PEM."""
    from cryptography import x509  # few processes need it
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hetjax run")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return built.public_bytes(pem).decode(), private.decode()
