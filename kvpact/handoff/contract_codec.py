"""Contracts from and to protobuf; decoding is total and refuses what a contract leaves unsaid."""

from __future__ import annotations

from kvpact.contract.contract import (
    SCHEMA_MAJOR,
    AttentionTemperature,
    Contract,
    FrequencyFormula,
    LatentDims,
    LayerGroup,
    ModelIdentity,
    Rotary,
    RotaryTable,
    Schema,
)
from kvpact.contract.validate import MOST_LAYERS, MOST_LENGTHS, validate_contract
from kvpact.handoff import codec_fields as fields
from kvpact.handoff.codec_fields import DIGEST_BYTES, EnumCodec, join
from kvpact.handoff.layout_codec import DTYPES, decode_layout, encode_layout
from kvpact.types import (
    Basis,
    FrequencyPolicy,
    KeyState,
    LaneOrder,
    LayerKind,
    RotationSite,
)
from kvpact.v1 import contract_pb2 as pb

MOST_TABLES = 8192
MOST_FREQUENCIES = 8192

KEY_STATES = EnumCodec(pb.KeyState, "KEY_STATE", KeyState)
SITES = EnumCodec(pb.RotationSite, "ROTATION_SITE", RotationSite)
LANE_ORDERS = EnumCodec(pb.LaneOrder, "LANE_ORDER", LaneOrder)
LAYER_KINDS = EnumCodec(pb.LayerKind, "LAYER_KIND", LayerKind)
POLICIES = EnumCodec(pb.FrequencyPolicy, "FREQUENCY_POLICY", FrequencyPolicy)
BASES = EnumCodec(pb.Basis, "BASIS", Basis)


def encode_contract(contract: Contract) -> pb.Contract:
    """Contract as a message."""
    schema = contract.schema
    return pb.Contract(
        schema=pb.Schema(major=schema.major, minor=schema.minor, required_features=schema.required_features),
        model=_encode_model(contract.model),
        layer_groups=[_encode_group(group) for group in contract.layer_groups],
        layout=encode_layout(contract.layout),
    )


def contract_to_bytes(contract: Contract) -> bytes:
    """Serialised contract, as PairOffer carries it."""
    return encode_contract(contract).SerializeToString(deterministic=True)


def contract_from_bytes(data: bytes, *, schema_major: int) -> Contract:
    """Second phase of the two: the body, once `schema_major`, read outside it, is known.

    Raises:
        BadRequest: the major version is unknown, or the body is malformed.
    """
    if schema_major != SCHEMA_MAJOR:
        raise fields.refusal("schema_major", f"is {schema_major}; this side knows {SCHEMA_MAJOR} only")
    contract = decode_contract(fields.parse(pb.Contract, data, "contract"))
    if contract.schema.major != schema_major:
        raise fields.refusal(
            "contract.schema.major", f"is {contract.schema.major}; the offer says {schema_major}"
        )
    return contract


def _check_sizes(message: pb.Contract, path: str) -> None:
    """Refuses absurd counts before anything is built from them."""
    groups = message.layer_groups
    counts = {
        "layer_groups": (len(groups), MOST_LAYERS),
        "layers": (sum(len(group.layers) for group in groups), MOST_LAYERS),
        "tables": (sum(len(group.rotary.tables) for group in groups), MOST_TABLES),
        "upper_length_tokens": (
            len({table.upper_length_tokens for group in groups for table in group.rotary.tables}),
            MOST_LENGTHS,
        ),
        "inv_freq": (
            max((len(table.inv_freq) for group in groups for table in group.rotary.tables), default=0),
            MOST_FREQUENCIES,
        ),
    }
    for name, (found, most) in counts.items():
        if found > most:
            raise fields.refusal(join(path, name), f"are {found}; at most {most} are taken")


def decode_contract(message: pb.Contract, path: str = "contract") -> Contract:
    """Contract from a message.

    Raises:
        BadRequest: a field is unset, unknown or contradicts another; `param` is its path.
    """
    _check_sizes(message, path)
    schema_path = fields.part(message, "schema", path)
    contract = Contract(
        schema=Schema(
            major=fields.integer(message.schema, "major", schema_path, least=1),
            minor=fields.integer(message.schema, "minor", schema_path, least=0),
            required_features=tuple(message.schema.required_features),
        ),
        model=_decode_model(message.model, fields.part(message, "model", path)),
        layer_groups=tuple(
            _decode_group(group, f"{path}.layer_groups[{index}]")
            for index, group in enumerate(message.layer_groups)
        ),
        layout=decode_layout(message.layout, fields.part(message, "layout", path)),
    )
    validate_contract(contract)
    return contract


def encode_table(table: RotaryTable) -> pb.RotaryTable:
    """Table as a message."""
    return pb.RotaryTable(
        inv_freq=table.inv_freq, amplitude=table.amplitude, upper_length_tokens=table.upper_length
    )


def decode_table(message: pb.RotaryTable, path: str) -> RotaryTable:
    """Table from a message."""
    return RotaryTable(
        inv_freq=fields.numbers(message.inv_freq, join(path, "inv_freq")),
        amplitude=fields.number(message, "amplitude", path, positive=True),
        upper_length=fields.optional_integer(message, "upper_length_tokens", path, least=1),
    )


def _encode_model(model: ModelIdentity) -> pb.ModelIdentity:
    return pb.ModelIdentity(
        architecture=model.architecture,
        function_digest=model.function_digest or b"",
        lm_head_digest=model.lm_head_digest or b"",
        tokenizer_digest=model.tokenizer_digest or b"",
        compute_dtype=DTYPES.encode(model.compute_dtype),
        context_tokens=model.context_tokens,
        name=model.name,
        revision=model.revision,
        engine=model.engine,
    )


def _decode_model(message: pb.ModelIdentity, path: str) -> ModelIdentity:
    def digest(field: str) -> bytes | None:
        return fields.optional_octets(getattr(message, field), join(path, field), length=DIGEST_BYTES)

    return ModelIdentity(
        architecture=fields.text(message.architecture, join(path, "architecture")),
        function_digest=digest("function_digest"),
        lm_head_digest=digest("lm_head_digest"),
        tokenizer_digest=digest("tokenizer_digest"),
        compute_dtype=DTYPES.decode(message.compute_dtype, join(path, "compute_dtype")),
        context_tokens=fields.integer(message, "context_tokens", path, least=1),
        name=message.name,
        revision=message.revision,
        engine=message.engine,
    )


def _encode_group(group: LayerGroup) -> pb.LayerGroup:
    return pb.LayerGroup(
        layers=group.layers,
        kind=LAYER_KINDS.encode(group.kind),
        window_tokens=group.window,
        kv_heads=group.kv_heads,
        key_dim=group.key_dim,
        value_dim=group.value_dim,
        softmax_scale=group.softmax_scale,
        softcap=group.softcap,
        sinks=group.sinks,
        temperature=None if group.temperature is None else _encode_temperature(group.temperature),
        latent=None if group.latent is None else _encode_latent(group.latent),
        rotary=_encode_rotary(group.rotary),
    )


def _decode_group(message: pb.LayerGroup, path: str) -> LayerGroup:
    if any(layer < 0 for layer in message.layers):
        raise fields.refusal(join(path, "layers"), f"holds {min(message.layers)}; layers count from 0")
    return LayerGroup(
        layers=tuple(message.layers),
        kind=LAYER_KINDS.decode(message.kind, join(path, "kind")),
        window=fields.optional_integer(message, "window_tokens", path, least=1),
        kv_heads=fields.integer(message, "kv_heads", path, least=1),
        key_dim=fields.integer(message, "key_dim", path, least=1),
        value_dim=fields.integer(message, "value_dim", path, least=1),
        softmax_scale=fields.number(message, "softmax_scale", path, positive=True),
        softcap=fields.optional_number(message, "softcap", path, positive=True),
        sinks=message.sinks,
        temperature=_decode_temperature(message, path),
        latent=_decode_latent(message, path),
        rotary=_decode_rotary(message.rotary, fields.part(message, "rotary", path)),
    )


def _encode_temperature(temperature: AttentionTemperature) -> pb.AttentionTemperature:
    return pb.AttentionTemperature(formula=temperature.formula, parameters=temperature.parameters)


def _decode_temperature(message: pb.LayerGroup, path: str) -> AttentionTemperature | None:
    if not message.HasField("temperature"):
        return None
    where = join(path, "temperature")
    return AttentionTemperature(
        formula=fields.text(message.temperature.formula, join(where, "formula")),
        parameters=fields.numbers(message.temperature.parameters, join(where, "parameters")),
    )


def _encode_latent(latent: LatentDims) -> pb.LatentDims:
    return pb.LatentDims(
        latent_dim=latent.latent_dim, rope_dim=latent.rope_dim, content_first=latent.content_first
    )


def _decode_latent(message: pb.LayerGroup, path: str) -> LatentDims | None:
    if not message.HasField("latent"):
        return None
    where = join(path, "latent")
    return LatentDims(
        latent_dim=fields.integer(message.latent, "latent_dim", where, least=1),
        rope_dim=fields.integer(message.latent, "rope_dim", where, least=1),
        content_first=message.latent.content_first,
    )


def _encode_rotary(rotary: Rotary) -> pb.Rotary:
    formula = rotary.formula
    recipe = (
        None if formula is None else pb.FrequencyFormula(name=formula.name, parameters=formula.parameters)
    )
    return pb.Rotary(
        key_state=KEY_STATES.encode(rotary.key_state),
        site=SITES.encode(rotary.site),
        rotary_dim=rotary.rotary_dim,
        lane_offset=rotary.lane_offset,
        stored_lane_order=LANE_ORDERS.encode(rotary.stored_lane_order),
        frequency_policy=POLICIES.encode(rotary.frequency_policy),
        tables=[encode_table(table) for table in rotary.tables],
        formula=recipe,
        mrope_sections=rotary.mrope_sections,
        mrope_interleaved=rotary.mrope_interleaved,
        basis=BASES.encode(rotary.basis),
    )


def _decode_rotary(message: pb.Rotary, path: str) -> Rotary:
    formula = None
    if message.HasField("formula"):
        formula = FrequencyFormula(
            name=fields.text(message.formula.name, join(path, "formula.name")),
            parameters=fields.numbers(message.formula.parameters, join(path, "formula.parameters")),
        )
    return Rotary(
        key_state=KEY_STATES.decode(message.key_state, join(path, "key_state")),
        site=SITES.decode(message.site, join(path, "site")),
        rotary_dim=fields.integer(message, "rotary_dim", path, least=0),
        lane_offset=fields.integer(message, "lane_offset", path, least=0),
        stored_lane_order=LANE_ORDERS.decode(message.stored_lane_order, join(path, "stored_lane_order")),
        frequency_policy=POLICIES.decode(message.frequency_policy, join(path, "frequency_policy")),
        tables=tuple(
            decode_table(table, f"{path}.tables[{index}]") for index, table in enumerate(message.tables)
        ),
        formula=formula,
        mrope_sections=tuple(message.mrope_sections),
        mrope_interleaved=message.mrope_interleaved,
        basis=BASES.decode(message.basis, join(path, "basis")),
    )
