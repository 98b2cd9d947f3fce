#include "parameters/rows.h"

#include <cmath>
#include <cstring>

#include "parameters/mix.h"

namespace torchrelay::parameters {
namespace {

double unit(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }  // [0, 1)

}  // namespace

bool Rows::try_take_slot(LockedEntry& entry) {
  const std::uint32_t class_index = slab_.class_index(entry.index());
  Pool& pool = slab_.pool(class_index);
  const LockGuard guard(pool.lock, slab_.users(), entry.user_id());
  if (pool.free_count > 0)
    entry->slot.store(free_slots(class_index)[--pool.free_count], std::memory_order_relaxed);
  else if (pool.never_used < entry.row_class().capacity)
    entry->slot.store(pool.never_used++, std::memory_order_relaxed);
  else
    return false;
  return true;
}

void Rows::free_slot(LockedEntry& entry) {
  const std::uint32_t class_index = slab_.class_index(entry.index());
  Pool& pool = slab_.pool(class_index);
  const std::uint32_t slot = entry->slot.exchange(kNoSlot, std::memory_order_relaxed);
  const LockGuard guard(pool.lock, slab_.users(), entry.user_id());
  free_slots(class_index)[pool.free_count] = slot;
  // A process that is killed here loses a slot, but gives none twice.
  std::atomic_signal_fence(std::memory_order_release);
  ++pool.free_count;
}

bool Rows::tight(std::uint32_t user_id) {
  const LockGuard guard(slab_.pool(0).lock, slab_.users(), user_id);
  return is_mostly_used(slab_.pool(0).never_used - slab_.pool(0).free_count, slab_.class_of(0).capacity);
}

void Rows::initialize(LockedEntry& entry, std::int64_t key) {
  const ClassInfo& info = entry.row_class();
  const Dtype dtype = slab_.header().dtype;
  std::byte* row = entry.row();
  std::memset(row, 0, info.stride_bytes);
  const std::uint64_t stream = mix(mix(static_cast<std::uint64_t>(key)) + init_.seed);
  for (std::uint32_t i = 0; i < info.length && init_.kind != InitKind::kZeros; ++i) {
    double value = init_.a;
    const double u = unit(mix(stream + 2 * i)), v = unit(mix(stream + 2 * i + 1));
    if (init_.kind == InitKind::kUniform) value += (init_.b - init_.a) * u;
    if (init_.kind == InitKind::kNormal)  // Box and Muller
      value += init_.b * std::sqrt(-2 * std::log(1 - u)) * std::cos(6.283185307179586 * v);
    store_double(dtype, row + i * size_bytes(dtype), value);
  }
  slab_.header().rule.initialize_state(dtype, row + info.length * size_bytes(dtype), info.length);
}

void Rows::initialize_dense() {
  const SlabHeader& header = slab_.header();
  const bool zero = init_.kind == InitKind::kZeros && header.rule.initial_accumulator == 0;
  for (std::int64_t key = header.node; key < static_cast<std::int64_t>(header.num_keys);
       key += header.num_nodes) {
    Entry& entry = slab_.entry(key);
    entry.slot.store(slab_.pool(slab_.class_index(key)).never_used++, std::memory_order_relaxed);
    entry.state = State::kOwned;
    if (zero) continue;
    LockedEntry locked(slab_, key, 0);
    initialize(locked, key);
  }
}

std::uint32_t* Rows::free_slots(std::uint32_t class_index) const {
  return reinterpret_cast<std::uint32_t*>(slab_.at(slab_.class_at(class_index).free_offset));
}

}  // namespace torchrelay::parameters
