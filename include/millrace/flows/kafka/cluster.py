"""The declaration of a Kafka cluster: brokers, TLS, SASL and time-outs, by librdkafka's names.

Names and defaults of the time-outs are those of ``pipeline-config.yaml`` in reference document 004. docs/pipelines.md
has the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from millrace.flows.declare.addresses import host_of
from millrace.flows.declare.part import Address, Part, Secret, check_certificates, words

Protocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]


def _certificates(text: str) -> str:
    check_certificates(text)
    return text


class KafkaSecurity(Part):
    """The client's identity, and how it verifies the brokers."""

    protocol: Protocol = words("with or without TLS and SASL", default="PLAINTEXT")
    mechanism: Mechanism | None = words("SASL's mechanism", default=None)
    username: str = words("of SASL", default="", max_length=256)
    password: Secret = words("SASL password; write-only", default=Secret(""))
    ca: Annotated[str, AfterValidator(_certificates)] = words(
        "CA certificates (PEM) for the brokers; empty: the system's", default="", max_length=1 << 18
    )
    certificate: Annotated[str, AfterValidator(_certificates)] = words(
        "the client's own certificate chain (PEM)", default="", max_length=1 << 18
    )
    key: Secret = words("its private key (PEM); write-only", default=Secret(""))

    @model_validator(mode="after")
    def _whole(self) -> KafkaSecurity:
        if self.protocol.startswith("SASL") and not (
            self.mechanism and self.username and self.password.get_secret_value()
        ):
            raise ValueError(f"{self.protocol} needs mechanism, username and password")
        if not self.protocol.startswith("SASL") and (self.mechanism or self.username):
            raise ValueError(f"{self.protocol} takes no mechanism or username: use SASL_SSL or SASL_PLAINTEXT")
        if not self.protocol.endswith("SSL") and (self.ca or self.certificate):
            raise ValueError(f"{self.protocol} takes no certificates: use SSL or SASL_SSL")
        if bool(self.certificate) != bool(self.key.get_secret_value()):
            raise ValueError("certificate and key are a pair: give both or neither")
        return self

    def client_settings(self) -> dict[str, str]:
        """Return the settings in the form of confluent-kafka."""
        found = {"security.protocol": self.protocol.lower()}
        if self.mechanism:
            found |= {
                "sasl.mechanism": self.mechanism,
                "sasl.username": self.username,
                "sasl.password": self.password.get_secret_value(),
            }
        if self.ca:
            found["ssl.ca.pem"] = self.ca
        if self.certificate:
            found |= {"ssl.certificate.pem": self.certificate, "ssl.key.pem": self.key.get_secret_value()}
        return found


class KafkaCluster(Part):
    """Brokers and how to reach them."""

    bootstrap: Annotated[tuple[Address, ...], Field(min_length=1, max_length=32)] = words("brokers, each host:port")
    security: KafkaSecurity = words("TLS and SASL", default_factory=KafkaSecurity)
    socket_timeout_ms: int = words(
        "socketTimeoutMs: longest wait for a broker's answer", default=60_000, ge=10, le=300_000
    )

    def addresses(self) -> Iterator[tuple[str, str]]:
        yield from ((f"bootstrap.{place}", host_of(each)) for place, each in enumerate(self.bootstrap))

    def client_settings(self) -> dict[str, str | int]:
        """Return the settings in the form of confluent-kafka."""
        return {
            "bootstrap.servers": ",".join(self.bootstrap),
            "socket.timeout.ms": self.socket_timeout_ms,
            **self.security.client_settings(),
        }
