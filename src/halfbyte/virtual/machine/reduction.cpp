// The table of reductions by operation and element type.
#include "machine/reduction.h"

namespace halfbyte::gpu {

namespace {

template <Reduction Operation, class Value>
void reduce_elements(uint8_t* target, const uint8_t* source, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    Value old, value;
    std::memcpy(&old, target + i * sizeof(Value), sizeof(Value));
    std::memcpy(&value, source + i * sizeof(Value), sizeof(Value));
    old = combine<Operation>(old, value);
    std::memcpy(target + i * sizeof(Value), &old, sizeof(Value));
  }
}

template <class Value>
ReduceElements find_order(Reduction operation) {
  switch (operation) {
    case Reduction::kAdd: return reduce_elements<Reduction::kAdd, Value>;
    case Reduction::kMin: return reduce_elements<Reduction::kMin, Value>;
    case Reduction::kMax: return reduce_elements<Reduction::kMax, Value>;
    default: return nullptr;
  }
}

template <class Value>
ReduceElements find_integer(Reduction operation) {
  switch (operation) {
    case Reduction::kInc: return reduce_elements<Reduction::kInc, Value>;
    case Reduction::kDec: return reduce_elements<Reduction::kDec, Value>;
    case Reduction::kAnd: return reduce_elements<Reduction::kAnd, Value>;
    case Reduction::kOr: return reduce_elements<Reduction::kOr, Value>;
    case Reduction::kXor: return reduce_elements<Reduction::kXor, Value>;
    default: return find_order<Value>(operation);
  }
}

}  // namespace

ReduceElements find_reduction(Reduction operation, Element element) {
  switch (element) {
    case Element::kU32: return find_integer<uint32_t>(operation);
    case Element::kS32: return find_integer<int32_t>(operation);
    case Element::kU64: return find_integer<uint64_t>(operation);
    case Element::kS64: return find_integer<int64_t>(operation);
    case Element::kF16: return find_order<Float16>(operation);
    case Element::kBf16: return find_order<Bfloat16>(operation);
    case Element::kF32: return find_order<float>(operation);
    case Element::kF64: return find_order<double>(operation);
    case Element::kF32Flush:
      return operation == Reduction::kAdd ? reduce_elements<Reduction::kAdd, FlushedFloat>
                                          : find_order<float>(operation);
  }
  return nullptr;
}

uint32_t element_bytes(Element element) {
  switch (element) {
    case Element::kU64:
    case Element::kS64:
    case Element::kF64: return 8;
    case Element::kF16:
    case Element::kBf16: return 2;
    default: return 4;
  }
}

}  // namespace halfbyte::gpu
