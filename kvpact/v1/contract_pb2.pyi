from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KeyState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KEY_STATE_UNSPECIFIED: _ClassVar[KeyState]
    KEY_STATE_RAW: _ClassVar[KeyState]
    KEY_STATE_ROTATED: _ClassVar[KeyState]
    KEY_STATE_NONE: _ClassVar[KeyState]

class RotationSite(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROTATION_SITE_UNSPECIFIED: _ClassVar[RotationSite]
    ROTATION_SITE_WRITER: _ClassVar[RotationSite]
    ROTATION_SITE_READER: _ClassVar[RotationSite]
    ROTATION_SITE_KERNEL: _ClassVar[RotationSite]

class LaneOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LANE_ORDER_UNSPECIFIED: _ClassVar[LaneOrder]
    LANE_ORDER_HALF_SPLIT: _ClassVar[LaneOrder]
    LANE_ORDER_ADJACENT: _ClassVar[LaneOrder]

class LayerKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LAYER_KIND_UNSPECIFIED: _ClassVar[LayerKind]
    LAYER_KIND_FULL: _ClassVar[LayerKind]
    LAYER_KIND_SLIDING: _ClassVar[LayerKind]
    LAYER_KIND_CHUNKED: _ClassVar[LayerKind]
    LAYER_KIND_MLA_LATENT: _ClassVar[LayerKind]
    LAYER_KIND_MLA_EXPANDED: _ClassVar[LayerKind]

class AxisOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AXIS_ORDER_UNSPECIFIED: _ClassVar[AxisOrder]
    AXIS_ORDER_NHD: _ClassVar[AxisOrder]
    AXIS_ORDER_HND: _ClassVar[AxisOrder]

class Packing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PACKING_UNSPECIFIED: _ClassVar[Packing]
    PACKING_SEPARATE: _ClassVar[Packing]
    PACKING_PACKED: _ClassVar[Packing]

class ByteOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BYTE_ORDER_UNSPECIFIED: _ClassVar[ByteOrder]
    BYTE_ORDER_LITTLE: _ClassVar[ByteOrder]
    BYTE_ORDER_BIG: _ClassVar[ByteOrder]

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[Dtype]
    DTYPE_FLOAT32: _ClassVar[Dtype]
    DTYPE_FLOAT16: _ClassVar[Dtype]
    DTYPE_BFLOAT16: _ClassVar[Dtype]
    DTYPE_FLOAT8_E4M3: _ClassVar[Dtype]
    DTYPE_FLOAT8_E5M2: _ClassVar[Dtype]
    DTYPE_INT8: _ClassVar[Dtype]

class QuantizationScheme(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUANTIZATION_SCHEME_UNSPECIFIED: _ClassVar[QuantizationScheme]
    QUANTIZATION_SCHEME_NONE: _ClassVar[QuantizationScheme]
    QUANTIZATION_SCHEME_SYMMETRIC: _ClassVar[QuantizationScheme]

class QuantizationGranularity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUANTIZATION_GRANULARITY_UNSPECIFIED: _ClassVar[QuantizationGranularity]
    QUANTIZATION_GRANULARITY_TENSOR: _ClassVar[QuantizationGranularity]
    QUANTIZATION_GRANULARITY_HEAD: _ClassVar[QuantizationGranularity]
    QUANTIZATION_GRANULARITY_TOKEN: _ClassVar[QuantizationGranularity]

class ScaleSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCALE_SOURCE_UNSPECIFIED: _ClassVar[ScaleSource]
    SCALE_SOURCE_SHIPPED: _ClassVar[ScaleSource]
    SCALE_SOURCE_FIXED: _ClassVar[ScaleSource]

class FrequencyPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FREQUENCY_POLICY_UNSPECIFIED: _ClassVar[FrequencyPolicy]
    FREQUENCY_POLICY_FROZEN: _ClassVar[FrequencyPolicy]
    FREQUENCY_POLICY_BY_REQUEST_LENGTH: _ClassVar[FrequencyPolicy]
    FREQUENCY_POLICY_BY_SERVED_LENGTH: _ClassVar[FrequencyPolicy]
    FREQUENCY_POLICY_BY_CURRENT_LENGTH: _ClassVar[FrequencyPolicy]

class Basis(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BASIS_UNSPECIFIED: _ClassVar[Basis]
    BASIS_IDENTITY: _ClassVar[Basis]
    BASIS_HADAMARD: _ClassVar[Basis]

class VerdictWord(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_WORD_UNSPECIFIED: _ClassVar[VerdictWord]
    VERDICT_WORD_ACCEPT: _ClassVar[VerdictWord]
    VERDICT_WORD_CONVERT: _ClassVar[VerdictWord]
    VERDICT_WORD_REJECT: _ClassVar[VerdictWord]

class IdentityRelation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IDENTITY_RELATION_UNSPECIFIED: _ClassVar[IdentityRelation]
    IDENTITY_RELATION_EQUAL: _ClassVar[IdentityRelation]
    IDENTITY_RELATION_DIFFERENT: _ClassVar[IdentityRelation]
    IDENTITY_RELATION_NOT_COMPARED: _ClassVar[IdentityRelation]

class Relation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RELATION_UNSPECIFIED: _ClassVar[Relation]
    RELATION_INCOMPATIBLE: _ClassVar[Relation]
    RELATION_CONVERTIBLE: _ClassVar[Relation]
    RELATION_ROUNDING: _ClassVar[Relation]
    RELATION_NOTED: _ClassVar[Relation]

class DifferenceAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIFFERENCE_ACTION_UNSPECIFIED: _ClassVar[DifferenceAction]
    DIFFERENCE_ACTION_REJECT: _ClassVar[DifferenceAction]
    DIFFERENCE_ACTION_CONVERT: _ClassVar[DifferenceAction]
    DIFFERENCE_ACTION_ACCEPT: _ClassVar[DifferenceAction]

class Exactness(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXACTNESS_UNSPECIFIED: _ClassVar[Exactness]
    EXACTNESS_BIT_EXACT: _ClassVar[Exactness]
    EXACTNESS_ROUNDING: _ClassVar[Exactness]
    EXACTNESS_LOSSY: _ClassVar[Exactness]
KEY_STATE_UNSPECIFIED: KeyState
KEY_STATE_RAW: KeyState
KEY_STATE_ROTATED: KeyState
KEY_STATE_NONE: KeyState
ROTATION_SITE_UNSPECIFIED: RotationSite
ROTATION_SITE_WRITER: RotationSite
ROTATION_SITE_READER: RotationSite
ROTATION_SITE_KERNEL: RotationSite
LANE_ORDER_UNSPECIFIED: LaneOrder
LANE_ORDER_HALF_SPLIT: LaneOrder
LANE_ORDER_ADJACENT: LaneOrder
LAYER_KIND_UNSPECIFIED: LayerKind
LAYER_KIND_FULL: LayerKind
LAYER_KIND_SLIDING: LayerKind
LAYER_KIND_CHUNKED: LayerKind
LAYER_KIND_MLA_LATENT: LayerKind
LAYER_KIND_MLA_EXPANDED: LayerKind
AXIS_ORDER_UNSPECIFIED: AxisOrder
AXIS_ORDER_NHD: AxisOrder
AXIS_ORDER_HND: AxisOrder
PACKING_UNSPECIFIED: Packing
PACKING_SEPARATE: Packing
PACKING_PACKED: Packing
BYTE_ORDER_UNSPECIFIED: ByteOrder
BYTE_ORDER_LITTLE: ByteOrder
BYTE_ORDER_BIG: ByteOrder
DTYPE_UNSPECIFIED: Dtype
DTYPE_FLOAT32: Dtype
DTYPE_FLOAT16: Dtype
DTYPE_BFLOAT16: Dtype
DTYPE_FLOAT8_E4M3: Dtype
DTYPE_FLOAT8_E5M2: Dtype
DTYPE_INT8: Dtype
QUANTIZATION_SCHEME_UNSPECIFIED: QuantizationScheme
QUANTIZATION_SCHEME_NONE: QuantizationScheme
QUANTIZATION_SCHEME_SYMMETRIC: QuantizationScheme
QUANTIZATION_GRANULARITY_UNSPECIFIED: QuantizationGranularity
QUANTIZATION_GRANULARITY_TENSOR: QuantizationGranularity
QUANTIZATION_GRANULARITY_HEAD: QuantizationGranularity
QUANTIZATION_GRANULARITY_TOKEN: QuantizationGranularity
SCALE_SOURCE_UNSPECIFIED: ScaleSource
SCALE_SOURCE_SHIPPED: ScaleSource
SCALE_SOURCE_FIXED: ScaleSource
FREQUENCY_POLICY_UNSPECIFIED: FrequencyPolicy
FREQUENCY_POLICY_FROZEN: FrequencyPolicy
FREQUENCY_POLICY_BY_REQUEST_LENGTH: FrequencyPolicy
FREQUENCY_POLICY_BY_SERVED_LENGTH: FrequencyPolicy
FREQUENCY_POLICY_BY_CURRENT_LENGTH: FrequencyPolicy
BASIS_UNSPECIFIED: Basis
BASIS_IDENTITY: Basis
BASIS_HADAMARD: Basis
VERDICT_WORD_UNSPECIFIED: VerdictWord
VERDICT_WORD_ACCEPT: VerdictWord
VERDICT_WORD_CONVERT: VerdictWord
VERDICT_WORD_REJECT: VerdictWord
IDENTITY_RELATION_UNSPECIFIED: IdentityRelation
IDENTITY_RELATION_EQUAL: IdentityRelation
IDENTITY_RELATION_DIFFERENT: IdentityRelation
IDENTITY_RELATION_NOT_COMPARED: IdentityRelation
RELATION_UNSPECIFIED: Relation
RELATION_INCOMPATIBLE: Relation
RELATION_CONVERTIBLE: Relation
RELATION_ROUNDING: Relation
RELATION_NOTED: Relation
DIFFERENCE_ACTION_UNSPECIFIED: DifferenceAction
DIFFERENCE_ACTION_REJECT: DifferenceAction
DIFFERENCE_ACTION_CONVERT: DifferenceAction
DIFFERENCE_ACTION_ACCEPT: DifferenceAction
EXACTNESS_UNSPECIFIED: Exactness
EXACTNESS_BIT_EXACT: Exactness
EXACTNESS_ROUNDING: Exactness
EXACTNESS_LOSSY: Exactness

class Schema(_message.Message):
    __slots__ = ("major", "minor", "required_features")
    MAJOR_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FEATURES_FIELD_NUMBER: _ClassVar[int]
    major: int
    minor: int
    required_features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, major: _Optional[int] = ..., minor: _Optional[int] = ..., required_features: _Optional[_Iterable[str]] = ...) -> None: ...

class Contract(_message.Message):
    __slots__ = ("schema", "model", "layer_groups", "layout")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYER_GROUPS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    schema: Schema
    model: ModelIdentity
    layer_groups: _containers.RepeatedCompositeFieldContainer[LayerGroup]
    layout: Layout
    def __init__(self, schema: _Optional[_Union[Schema, _Mapping]] = ..., model: _Optional[_Union[ModelIdentity, _Mapping]] = ..., layer_groups: _Optional[_Iterable[_Union[LayerGroup, _Mapping]]] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ...) -> None: ...

class ModelIdentity(_message.Message):
    __slots__ = ("architecture", "function_digest", "lm_head_digest", "tokenizer_digest", "compute_dtype", "context_tokens", "name", "revision", "engine")
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LM_HEAD_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    architecture: str
    function_digest: bytes
    lm_head_digest: bytes
    tokenizer_digest: bytes
    compute_dtype: Dtype
    context_tokens: int
    name: str
    revision: str
    engine: str
    def __init__(self, architecture: _Optional[str] = ..., function_digest: _Optional[bytes] = ..., lm_head_digest: _Optional[bytes] = ..., tokenizer_digest: _Optional[bytes] = ..., compute_dtype: _Optional[_Union[Dtype, str]] = ..., context_tokens: _Optional[int] = ..., name: _Optional[str] = ..., revision: _Optional[str] = ..., engine: _Optional[str] = ...) -> None: ...

class LayerGroup(_message.Message):
    __slots__ = ("layers", "kind", "window_tokens", "kv_heads", "key_dim", "value_dim", "softmax_scale", "softcap", "sinks", "temperature", "latent", "rotary")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    KEY_DIM_FIELD_NUMBER: _ClassVar[int]
    VALUE_DIM_FIELD_NUMBER: _ClassVar[int]
    SOFTMAX_SCALE_FIELD_NUMBER: _ClassVar[int]
    SOFTCAP_FIELD_NUMBER: _ClassVar[int]
    SINKS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    LATENT_FIELD_NUMBER: _ClassVar[int]
    ROTARY_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    kind: LayerKind
    window_tokens: int
    kv_heads: int
    key_dim: int
    value_dim: int
    softmax_scale: float
    softcap: float
    sinks: bool
    temperature: AttentionTemperature
    latent: LatentDims
    rotary: Rotary
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., kind: _Optional[_Union[LayerKind, str]] = ..., window_tokens: _Optional[int] = ..., kv_heads: _Optional[int] = ..., key_dim: _Optional[int] = ..., value_dim: _Optional[int] = ..., softmax_scale: _Optional[float] = ..., softcap: _Optional[float] = ..., sinks: _Optional[bool] = ..., temperature: _Optional[_Union[AttentionTemperature, _Mapping]] = ..., latent: _Optional[_Union[LatentDims, _Mapping]] = ..., rotary: _Optional[_Union[Rotary, _Mapping]] = ...) -> None: ...

class AttentionTemperature(_message.Message):
    __slots__ = ("formula", "parameters")
    FORMULA_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    formula: str
    parameters: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, formula: _Optional[str] = ..., parameters: _Optional[_Iterable[float]] = ...) -> None: ...

class LatentDims(_message.Message):
    __slots__ = ("latent_dim", "rope_dim", "content_first")
    LATENT_DIM_FIELD_NUMBER: _ClassVar[int]
    ROPE_DIM_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIRST_FIELD_NUMBER: _ClassVar[int]
    latent_dim: int
    rope_dim: int
    content_first: bool
    def __init__(self, latent_dim: _Optional[int] = ..., rope_dim: _Optional[int] = ..., content_first: _Optional[bool] = ...) -> None: ...

class Rotary(_message.Message):
    __slots__ = ("key_state", "site", "rotary_dim", "lane_offset", "stored_lane_order", "frequency_policy", "tables", "formula", "mrope_sections", "mrope_interleaved", "basis")
    KEY_STATE_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    ROTARY_DIM_FIELD_NUMBER: _ClassVar[int]
    LANE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    STORED_LANE_ORDER_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_POLICY_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    FORMULA_FIELD_NUMBER: _ClassVar[int]
    MROPE_SECTIONS_FIELD_NUMBER: _ClassVar[int]
    MROPE_INTERLEAVED_FIELD_NUMBER: _ClassVar[int]
    BASIS_FIELD_NUMBER: _ClassVar[int]
    key_state: KeyState
    site: RotationSite
    rotary_dim: int
    lane_offset: int
    stored_lane_order: LaneOrder
    frequency_policy: FrequencyPolicy
    tables: _containers.RepeatedCompositeFieldContainer[RotaryTable]
    formula: FrequencyFormula
    mrope_sections: _containers.RepeatedScalarFieldContainer[int]
    mrope_interleaved: bool
    basis: Basis
    def __init__(self, key_state: _Optional[_Union[KeyState, str]] = ..., site: _Optional[_Union[RotationSite, str]] = ..., rotary_dim: _Optional[int] = ..., lane_offset: _Optional[int] = ..., stored_lane_order: _Optional[_Union[LaneOrder, str]] = ..., frequency_policy: _Optional[_Union[FrequencyPolicy, str]] = ..., tables: _Optional[_Iterable[_Union[RotaryTable, _Mapping]]] = ..., formula: _Optional[_Union[FrequencyFormula, _Mapping]] = ..., mrope_sections: _Optional[_Iterable[int]] = ..., mrope_interleaved: _Optional[bool] = ..., basis: _Optional[_Union[Basis, str]] = ...) -> None: ...

class RotaryTable(_message.Message):
    __slots__ = ("inv_freq", "amplitude", "upper_length_tokens")
    INV_FREQ_FIELD_NUMBER: _ClassVar[int]
    AMPLITUDE_FIELD_NUMBER: _ClassVar[int]
    UPPER_LENGTH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    inv_freq: _containers.RepeatedScalarFieldContainer[float]
    amplitude: float
    upper_length_tokens: int
    def __init__(self, inv_freq: _Optional[_Iterable[float]] = ..., amplitude: _Optional[float] = ..., upper_length_tokens: _Optional[int] = ...) -> None: ...

class FrequencyFormula(_message.Message):
    __slots__ = ("name", "parameters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    parameters: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, name: _Optional[str] = ..., parameters: _Optional[_Iterable[float]] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("axis_order", "block_size_tokens", "packing", "key_dtype", "value_dtype", "byte_order", "key_quantization", "value_quantization", "shard")
    AXIS_ORDER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PACKING_FIELD_NUMBER: _ClassVar[int]
    KEY_DTYPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BYTE_ORDER_FIELD_NUMBER: _ClassVar[int]
    KEY_QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    VALUE_QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    axis_order: AxisOrder
    block_size_tokens: int
    packing: Packing
    key_dtype: Dtype
    value_dtype: Dtype
    byte_order: ByteOrder
    key_quantization: Quantization
    value_quantization: Quantization
    shard: Shard
    def __init__(self, axis_order: _Optional[_Union[AxisOrder, str]] = ..., block_size_tokens: _Optional[int] = ..., packing: _Optional[_Union[Packing, str]] = ..., key_dtype: _Optional[_Union[Dtype, str]] = ..., value_dtype: _Optional[_Union[Dtype, str]] = ..., byte_order: _Optional[_Union[ByteOrder, str]] = ..., key_quantization: _Optional[_Union[Quantization, _Mapping]] = ..., value_quantization: _Optional[_Union[Quantization, _Mapping]] = ..., shard: _Optional[_Union[Shard, _Mapping]] = ...) -> None: ...

class Quantization(_message.Message):
    __slots__ = ("scheme", "granularity", "scale_source", "fixed_scales")
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    GRANULARITY_FIELD_NUMBER: _ClassVar[int]
    SCALE_SOURCE_FIELD_NUMBER: _ClassVar[int]
    FIXED_SCALES_FIELD_NUMBER: _ClassVar[int]
    scheme: QuantizationScheme
    granularity: QuantizationGranularity
    scale_source: ScaleSource
    fixed_scales: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, scheme: _Optional[_Union[QuantizationScheme, str]] = ..., granularity: _Optional[_Union[QuantizationGranularity, str]] = ..., scale_source: _Optional[_Union[ScaleSource, str]] = ..., fixed_scales: _Optional[_Iterable[float]] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("tensor_parallel_rank", "tensor_parallel_size", "head_start", "head_end", "layer_start", "layer_end")
    TENSOR_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    tensor_parallel_rank: int
    tensor_parallel_size: int
    head_start: int
    head_end: int
    layer_start: int
    layer_end: int
    def __init__(self, tensor_parallel_rank: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., head_start: _Optional[int] = ..., head_end: _Optional[int] = ..., layer_start: _Optional[int] = ..., layer_end: _Optional[int] = ...) -> None: ...

class Difference(_message.Message):
    __slots__ = ("field", "layers", "writer", "reader", "relation", "action", "remedy", "explanation")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    RELATION_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    field: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    writer: str
    reader: str
    relation: Relation
    action: DifferenceAction
    remedy: str
    explanation: str
    def __init__(self, field: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ..., writer: _Optional[str] = ..., reader: _Optional[str] = ..., relation: _Optional[_Union[Relation, str]] = ..., action: _Optional[_Union[DifferenceAction, str]] = ..., remedy: _Optional[str] = ..., explanation: _Optional[str] = ...) -> None: ...

class PlanStep(_message.Message):
    __slots__ = ("op", "exactness", "bound_epsilons")
    OP_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    BOUND_EPSILONS_FIELD_NUMBER: _ClassVar[int]
    op: str
    exactness: Exactness
    bound_epsilons: float
    def __init__(self, op: _Optional[str] = ..., exactness: _Optional[_Union[Exactness, str]] = ..., bound_epsilons: _Optional[float] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("word", "identity", "differences", "plan", "exactness", "writer_digest", "reader_digest")
    WORD_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    WRITER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    READER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    word: VerdictWord
    identity: IdentityRelation
    differences: _containers.RepeatedCompositeFieldContainer[Difference]
    plan: _containers.RepeatedCompositeFieldContainer[PlanStep]
    exactness: Exactness
    writer_digest: bytes
    reader_digest: bytes
    def __init__(self, word: _Optional[_Union[VerdictWord, str]] = ..., identity: _Optional[_Union[IdentityRelation, str]] = ..., differences: _Optional[_Iterable[_Union[Difference, _Mapping]]] = ..., plan: _Optional[_Iterable[_Union[PlanStep, _Mapping]]] = ..., exactness: _Optional[_Union[Exactness, str]] = ..., writer_digest: _Optional[bytes] = ..., reader_digest: _Optional[bytes] = ...) -> None: ...
