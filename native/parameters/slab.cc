#include "parameters/slab.h"

#include <algorithm>
#include <bit>
#include <map>

#include "core/error.h"
#include "core/shared_memory.h"

namespace torchrelay::parameters {
namespace {

constexpr std::uint64_t kMagic = 0x3142414c53525454;  // "TTRSLAB1"
constexpr std::uint32_t kVersion = 4;
constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kRowAlignment = 16;

std::uint64_t align(std::uint64_t value, std::uint64_t to) { return (value + to - 1) / to * to; }

// Takes `size` bytes of the slab; what starts on a page of its own shares no cache line with its neighbour.
std::uint64_t take(std::uint64_t& end, std::uint64_t size) {
  const std::uint64_t start = align(end, kPage);
  end = start + size;
  return start;
}

struct Plan {
  Geometry geometry{};
  std::vector<std::uint32_t> lengths;  // of each class
  std::vector<std::uint64_t> sizes;    // keys of each class
  std::vector<std::uint16_t> class_of;
};

Plan plan_classes(const StoreSpec& spec) {
  Plan plan;
  if (spec.lengths.size() == 1) {
    plan.lengths = spec.lengths;
    plan.sizes = {spec.num_keys == 0 ? spec.capacity : spec.num_keys};
    return plan;
  }
  std::map<std::uint32_t, std::uint16_t> class_index;
  for (const std::uint32_t length : spec.lengths) {
    const auto [place, is_new] =
        class_index.try_emplace(length, static_cast<std::uint16_t>(plan.lengths.size()));
    if (is_new) {
      if (plan.lengths.size() == UINT16_MAX)
        throw Error(Code::kArgument, "parameters: keys may have at most 65534 different lengths");
      plan.lengths.push_back(length);
      plan.sizes.push_back(0);
    }
    plan.class_of.push_back(place->second);
    ++plan.sizes[place->second];
  }
  if (plan.lengths.size() == 1) plan.class_of.clear();
  return plan;
}

std::vector<ClassInfo> lay_out(const StoreSpec& spec, Plan& plan) {
  Geometry& header = plan.geometry;
  // A node also keeps entries of keys that have moved away, or whose location it remembers.
  const std::uint64_t places = spec.capacity * (spec.num_nodes > 1 ? 4 : 2);
  const std::uint64_t entries = spec.num_keys != 0 ? spec.num_keys : std::bit_ceil(places);
  header.dtype = spec.dtype;
  header.rule = spec.rule;
  header.node = spec.node;
  header.num_nodes = spec.num_nodes;
  header.num_channels = spec.num_channels;
  header.num_classes = static_cast<std::uint32_t>(plan.lengths.size());
  header.num_entries = entries;
  header.num_keys = spec.num_keys;
  std::uint64_t end = sizeof(SlabHeader);
  header.users_offset = take(end, sizeof(User) * kMaxUsers);
  header.classes_offset = take(end, sizeof(ClassInfo) * header.num_classes);
  header.pools_offset = take(end, sizeof(Pool) * header.num_classes);
  header.entries_offset = take(end, sizeof(Entry) * entries);
  header.epochs_offset = take(end, sizeof(std::uint32_t) * entries);
  header.class_of_offset = plan.class_of.empty() ? 0 : take(end, sizeof(std::uint16_t) * entries);
  header.keys_offset = spec.num_keys != 0 ? 0 : take(end, sizeof(std::int64_t) * entries);
  const std::uint64_t run = std::uint64_t{spec.num_nodes} * spec.num_channels;
  header.channel_entries = spec.num_keys != 0 ? (entries + run - 1) / run * spec.num_nodes : entries;
  header.changed_bytes = MarkSet::bytes(header.channel_entries);
  header.changed_offset = take(end, header.changed_bytes * spec.num_channels);
  std::vector<ClassInfo> classes(header.num_classes);
  for (std::size_t i = 0; i < classes.size(); ++i) {
    ClassInfo& info = classes[i];
    info.length = plan.lengths[i];
    info.row_length =
        static_cast<std::uint32_t>(info.length + spec.rule.state_length(spec.dtype, info.length));
    info.stride_bytes = align(info.row_length * size_bytes(spec.dtype), kRowAlignment);
    info.capacity = plan.sizes[i];
    info.free_offset = take(end, sizeof(std::uint32_t) * info.capacity);
    info.rows_offset = take(end, info.stride_bytes * info.capacity);
    info.accumulators_offset = take(end, info.stride_bytes * info.capacity);
  }
  header.size_bytes = align(end, kPage);
  return classes;
}

}  // namespace

Slab::Slab(SharedMemory memory)
    : memory_(std::make_unique<SharedMemory>(std::move(memory))),
      header_(reinterpret_cast<SlabHeader*>(memory_->data())) {}

Slab::Slab(Slab&& other) noexcept = default;
Slab::~Slab() = default;

std::string Slab::address() const { return memory_->address(); }

void Slab::map() {
  users_ = reinterpret_cast<User*>(at(header_->users_offset));
  classes_ = reinterpret_cast<ClassInfo*>(at(header_->classes_offset));
  pools_ = reinterpret_cast<Pool*>(at(header_->pools_offset));
  entries_ = reinterpret_cast<Entry*>(at(header_->entries_offset));
  epochs_ = reinterpret_cast<std::atomic<std::uint32_t>*>(at(header_->epochs_offset));
  class_of_ = header_->class_of_offset == 0 ? nullptr
                                            : reinterpret_cast<std::uint16_t*>(at(header_->class_of_offset));
  keys_ = header_->keys_offset == 0 ? nullptr
                                    : reinterpret_cast<std::atomic<std::int64_t>*>(at(header_->keys_offset));
}

Slab Slab::create(const StoreSpec& spec) {
  check(spec);
  Plan plan = plan_classes(spec);
  const std::vector<ClassInfo> classes = lay_out(spec, plan);
  Slab slab(SharedMemory::create(plan.geometry.size_bytes, "torchrelay-parameters"));
  SlabHeader& header = *slab.header_;
  static_cast<Geometry&>(header) = plan.geometry;
  header.learning_rate = spec.rule.learning_rate;
  header.leader = ProcessId::current();
  slab.map();
  std::ranges::copy(classes, slab.classes_);
  if (slab.class_of_ != nullptr) std::ranges::copy(plan.class_of, slab.class_of_);
  for (std::uint64_t i = 0; i < header.num_entries; ++i) {
    const auto entry_index = static_cast<std::int64_t>(i);
    Entry& entry = slab.entry(entry_index);
    entry.slot.store(kNoSlot, std::memory_order_relaxed);
    if (slab.header().dynamic())
      slab.keys_[i].store(kNoKey, std::memory_order_relaxed);
    else
      entry.owner = static_cast<std::uint16_t>(slab.header().home_of(entry_index));
  }
  return slab;
}

Slab Slab::attach(const std::string& address) {
  Slab slab(SharedMemory::attach(address));
  const SlabHeader& header = *slab.header_;
  if (slab.memory_->size_bytes() < sizeof(SlabHeader) || header.magic != kMagic ||
      header.version != kVersion || header.size_bytes != slab.memory_->size_bytes())
    throw Error(Code::kProtocol,
                "parameters: the segment at " + address + " is no table of this version of torchrelay");
  slab.map();
  return slab;
}

void Slab::publish() {
  header_->version = kVersion;
  std::atomic_ref(header_->magic).store(kMagic, std::memory_order_release);
}

std::uint64_t Slab::total(Stat stat) const {
  std::uint64_t sum = 0;
  for (const auto& stats : header_->stats) sum += stats[stat].load(std::memory_order_relaxed);
  return sum;
}

}  // namespace torchrelay::parameters
