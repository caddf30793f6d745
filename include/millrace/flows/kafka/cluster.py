"""How Kafka's clients are reached: brokers, TLS, SASL and time-outs, by librdkafka's names.

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
    """Who the client is, and how it knows the brokers."""

    protocol: Protocol = words("TLS or not, SASL or not", default="PLAINTEXT")
    mechanism: Mechanism | None = words("SASL's mechanism", default=None)
    username: str = words("of SASL", default="", max_length=256)
    password: Secret = words("of SASL; write-only", default=Secret(""))
    ca: Annotated[str, AfterValidator(_certificates)] = words(
        "certificates (PEM) that sign the brokers'; empty: those of the system", default="", max_length=1 << 18
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
            raise ValueError(f"{self.protocol} takes no mechanism and no username: say SASL_SSL or SASL_PLAINTEXT")
        if not self.protocol.endswith("SSL") and (self.ca or self.certificate):
            raise ValueError(f"{self.protocol} takes no certificates: say SSL or SASL_SSL")
        if bool(self.certificate) != bool(self.key.get_secret_value()):
            raise ValueError("certificate and key belong together: give both, or none")
        return self

    def client_settings(self) -> dict[str, str]:
        """As confluent-kafka takes it."""
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

    bootstrap: Annotated[tuple[Address, ...], Field(min_length=1, max_length=32)] = words("brokers, host:port each")
    security: KafkaSecurity = words("TLS and SASL", default_factory=KafkaSecurity)
    socket_timeout_ms: int = words(
        "socketTimeoutMs: longest wait for a broker's answer", default=60_000, ge=10, le=300_000
    )

    def addresses(self) -> Iterator[tuple[str, str]]:
        yield from ((f"bootstrap.{place}", host_of(each)) for place, each in enumerate(self.bootstrap))

    def client_settings(self) -> dict[str, str | int]:
        """As confluent-kafka takes it."""
        return {
            "bootstrap.servers": ",".join(self.bootstrap),
            "socket.timeout.ms": self.socket_timeout_ms,
            **self.security.client_settings(),
        }
