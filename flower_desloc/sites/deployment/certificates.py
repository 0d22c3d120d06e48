"""A certificate authority of one's own, and a server's certificate signed by it."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP384R1,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat
from cryptography.x509.oid import NameOID

from flower_desloc.sites.deployment.keys import write_private

_AUTHORITY = "Federation CA"
_CLOCKS_DIFFER_BY = timedelta(hours=1)


@dataclass(frozen=True)
class Certificates:
    """What a SuperLink serves TLS with; all files are PEM."""

    ca: Path
    """The authority's certificate: every SuperNode and every `flwr` command needs it."""
    certificate: Path
    key: Path


def make_certificates(
    folder: Path, hosts: Sequence[str], *, valid: timedelta = timedelta(days=30)
) -> Certificates:
    """Write the certificates of a server that is reached as ``hosts``, names or addresses.

    The authority signs this one certificate and no other: its key is thrown away.
    """
    authority, server = generate_private_key(SECP384R1()), generate_private_key(SECP384R1())
    public = authority.public_key()
    root = (
        _begun(_AUTHORITY, public, valid)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_SIGNS_CERTIFICATES, critical=True)
        .sign(authority, SHA384())
    )
    leaf = (
        _begun(hosts[0], server.public_key(), valid)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        # Clients look for the host among these names, not at the subject.
        .add_extension(x509.SubjectAlternativeName([_name(h) for h in hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(authority, SHA384())
    )
    made = Certificates(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    made.ca.write_bytes(root.public_bytes(Encoding.PEM))
    made.certificate.write_bytes(leaf.public_bytes(Encoding.PEM))
    write_private(made.key, server, PrivateFormat.PKCS8)
    return made


def _begun(subject: str, key: EllipticCurvePublicKey, valid: timedelta) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _AUTHORITY)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER_BY)
        .not_valid_after(now + valid)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


_SIGNS_CERTIFICATES = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)
