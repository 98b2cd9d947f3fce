#include "torchrelay/parameters/store.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <map>
#include <new>

#include "torchrelay/error.h"
#include "torchrelay/host_memory.h"
#include "torchrelay/parameters/locked_entry.h"

namespace torchrelay::parameters {
namespace {

constexpr std::uint64_t kMagic = 0x3142414c53525454;  // "TTRSLAB1"
constexpr std::uint32_t kVersion = 4;
constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kRowAlignment = 16;
constexpr std::int64_t kNoKey = INT64_MIN;
constexpr std::uint32_t kMaxLength = 1u << 28;

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

// What a node needs: the entries of all keys, and the rows of its share. Replicas come on top.
void check_memory(const StoreSpec& spec) {
  constexpr double kGiB = 1 << 30;
  const double keys = static_cast<double>(std::max(spec.num_keys, spec.capacity));
  double elements = 0;
  for (const std::uint32_t length : spec.lengths)
    elements += static_cast<double>(length + spec.rule.state_length(length));
  if (spec.lengths.size() == 1) elements *= keys;
  if (spec.num_keys != 0) elements /= spec.num_nodes;
  const double rows = elements * static_cast<double>(size_bytes(spec.dtype));
  const double entries = keys * (sizeof(Entry) + sizeof(std::uint32_t));  // and the location epochs
  const auto available = static_cast<double>(host_memory_bytes());
  if (rows + entries <= available) return;
  char sizes[160];
  std::snprintf(sizes, sizeof sizes, "%.1f GiB for rows and %.1f GiB to find them", rows / kGiB,
                entries / kGiB);
  char limit[32];
  std::snprintf(limit, sizeof limit, "%.1f GiB", available / kGiB);
  throw Error(Code::kArgument,
              "parameters: node " + std::to_string(spec.node) + " of " + std::to_string(spec.num_nodes) +
                  " would need " + sizes + ", but this host has " + limit +
                  "; use more hosts, fewer keys or shorter rows, or a table without a number "
                  "of keys, which evicts those least used");
}

void check(const StoreSpec& spec) {
  const auto fail = [](const std::string& message) {
    throw Error(Code::kArgument, "parameters: " + message);
  };
  if (spec.num_nodes < 1 || spec.num_nodes > kMaxNodes || spec.node >= spec.num_nodes)
    fail("node " + std::to_string(spec.node) + " of " + std::to_string(spec.num_nodes) +
         " does not exist; at most " + std::to_string(kMaxNodes) + " nodes");
  if (spec.num_channels < 1 || spec.num_channels > kMaxChannels)
    fail(std::to_string(spec.num_channels) + " channels; from 1 to " + std::to_string(kMaxChannels) +
         " are possible");
  if (spec.lengths.empty() || std::ranges::find(spec.lengths, 0u) != spec.lengths.end())
    fail("every key's length must be at least 1");
  if (const std::uint32_t longest = *std::ranges::max_element(spec.lengths); longest > kMaxLength)
    fail("a length of " + std::to_string(longest) + " elements; at most " + std::to_string(kMaxLength));
  if (spec.num_keys == 0 && spec.capacity == 0) fail("a table without a number of keys needs a capacity");
  if (spec.lengths.size() != 1 && spec.lengths.size() != spec.num_keys)
    fail("there are " + std::to_string(spec.lengths.size()) + " lengths for " +
         std::to_string(spec.num_keys) + " keys");
  if (!is_table_dtype(spec.dtype)) fail(std::string("no table has values of ") + name(spec.dtype));
  if (!spec.rule.allows(spec.dtype)) fail("optimizers inside the store need float32 or float64 values");
  const std::uint64_t rows = std::max(spec.num_keys, spec.capacity);
  if (rows >= kNoSlot) fail(std::to_string(rows) + " keys; a table has less than " + std::to_string(kNoSlot));
  check_memory(spec);
}

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
    info.row_length = static_cast<std::uint32_t>(info.length + spec.rule.state_length(info.length));
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

Store::Store(SharedMemory memory, const KeyInit& init) : memory_(std::move(memory)), init_(init) {
  header_ = reinterpret_cast<SlabHeader*>(memory_.data());
}

void Store::map() {
  std::byte* base = memory_.data();
  users_ = reinterpret_cast<User*>(base + header_->users_offset);
  classes_ = reinterpret_cast<ClassInfo*>(base + header_->classes_offset);
  pools_ = reinterpret_cast<Pool*>(base + header_->pools_offset);
  entries_ = reinterpret_cast<Entry*>(base + header_->entries_offset);
  epochs_ = reinterpret_cast<std::atomic<std::uint32_t>*>(base + header_->epochs_offset);
  class_of_ = header_->class_of_offset == 0
                  ? nullptr
                  : reinterpret_cast<std::uint16_t*>(base + header_->class_of_offset);
  keys_ = header_->keys_offset == 0
              ? nullptr
              : reinterpret_cast<std::atomic<std::int64_t>*>(base + header_->keys_offset);
}

Store Store::create(const StoreSpec& spec) {
  check(spec);
  Plan plan = plan_classes(spec);
  const std::vector<ClassInfo> classes = lay_out(spec, plan);
  Store store(SharedMemory::create(plan.geometry.size_bytes, "torchrelay-parameters"), spec.init);
  SlabHeader& header = *store.header_;
  static_cast<Geometry&>(header) = plan.geometry;
  header.learning_rate = spec.rule.learning_rate;
  header.leader = ProcessId::current();
  store.map();
  std::ranges::copy(classes, store.classes_);
  if (store.class_of_ != nullptr) std::ranges::copy(plan.class_of, store.class_of_);
  for (std::uint64_t entry_index = 0; entry_index < header.num_entries; ++entry_index) {
    Entry& entry = store.entries_[entry_index];
    entry.slot.store(kNoSlot, std::memory_order_relaxed);
    if (store.dynamic()) {
      store.keys_[entry_index].store(kNoKey, std::memory_order_relaxed);
      continue;
    }
    entry.owner = static_cast<std::uint16_t>(store.home_of(static_cast<std::int64_t>(entry_index)));
    if (entry.owner != spec.node) continue;
    Pool& pool = store.pools_[store.class_index(static_cast<std::int64_t>(entry_index))];
    entry.slot.store(pool.never_used++, std::memory_order_relaxed);
    entry.state = State::kOwned;
    if (spec.init.kind == InitKind::kZeros && spec.rule.initial_accumulator == 0) continue;
    LockedEntry locked(store, static_cast<std::int64_t>(entry_index), 0);
    store.initialize_row(locked, locked.key());
  }
  header.version = kVersion;
  std::atomic_ref(header.magic).store(kMagic, std::memory_order_release);
  return store;
}

Store Store::attach(const std::string& address, const KeyInit& init) {
  Store store(SharedMemory::attach(address), init);
  const SlabHeader& header = *store.header_;
  if (store.memory_.size_bytes() < sizeof(SlabHeader) || header.magic != kMagic ||
      header.version != kVersion || header.size_bytes != store.memory_.size_bytes())
    throw Error(Code::kProtocol,
                "parameters: the segment at " + address + " is no table of this version of torchrelay");
  store.map();
  return store;
}

void Store::take_user(std::uint32_t user_id) {
  User& place = users_[user_id];
  if (place.pid.load() != 0 && is_alive(place))
    throw Error(Code::kArgument, "parameters: worker " + std::to_string(user_id - kMaxChannels) +
                                     " of this node exists already, in process " +
                                     std::to_string(place.pid.load()) +
                                     "; give each worker its own worker_id");
  if (place.pid.load() != 0) {  // its holder died, maybe holding a lock
    const auto free = [user_id](std::atomic<std::uint32_t>& lock) {
      std::uint32_t expected = user_id + 1;
      lock.compare_exchange_strong(expected, 0);
    };
    for (std::uint64_t entry_index = 0; entry_index < header_->num_entries; ++entry_index)
      free(entries_[entry_index].lock);
    for (std::uint32_t i = 0; i < header_->num_classes; ++i) free(pools_[i].lock);
    free(header_->index_lock);
  }
  place.process_start = ProcessId::current().start_ticks;
  ++place.incarnation;
  place.clock = 0;
  place.pid = getpid();
}

void Store::leave_user(std::uint32_t user_id) {
  users_[user_id].clock = kFinished;
  users_[user_id].pid = 0;
}

bool Store::take_free_slot(LockedEntry& entry) {
  const std::uint32_t class_index = this->class_index(entry.index());
  const ClassInfo& info = classes_[class_index];
  Pool& pool = pools_[class_index];
  const LockGuard guard(pool.lock, users_, entry.user_id());
  const auto* free_slots = reinterpret_cast<const std::uint32_t*>(memory_.data() + info.free_offset);
  if (pool.free_count > 0)
    entry->slot.store(free_slots[--pool.free_count], std::memory_order_relaxed);
  else if (pool.never_used < info.capacity)
    entry->slot.store(pool.never_used++, std::memory_order_relaxed);
  else
    return false;
  return true;
}

void Store::take_slot(LockedEntry& entry) {
  while (!take_free_slot(entry)) {
    const LockGuard guard(header_->index_lock, users_, entry.user_id());
    if (!evict_one(entry.user_id())) throw_full();
  }
}

void Store::throw_full() const {
  throw Error(Code::kUnavailable,
              "parameters: node " + std::to_string(header_->node) + " holds " +
                  std::to_string(header_->num_entries / 2) +
                  " keys or fewer, as many as fit into its slab, and can evict none: all are "
                  "replicated, on loan from another node, or just used; give the table a larger capacity");
}

void Store::free_slot(LockedEntry& entry) {
  const std::uint32_t class_index = this->class_index(entry.index());
  Pool& pool = pools_[class_index];
  const std::uint32_t slot = entry->slot.exchange(kNoSlot, std::memory_order_relaxed);
  const LockGuard guard(pool.lock, users_, entry.user_id());
  auto* free_slots = reinterpret_cast<std::uint32_t*>(memory_.data() + classes_[class_index].free_offset);
  free_slots[pool.free_count] = slot;
  std::atomic_signal_fence(
      std::memory_order_release);  // who is killed here loses a slot, but gives none twice
  ++pool.free_count;
}

std::uint64_t Store::total(Stat stat) const {
  std::uint64_t sum = 0;
  for (const auto& stats : header_->stats) sum += stats[stat].load(std::memory_order_relaxed);
  return sum;
}

std::vector<std::int64_t> Store::owned_keys() const {
  std::vector<std::int64_t> keys;
  for (std::uint64_t entry_index = 0; entry_index < header_->num_entries; ++entry_index)
    if (entries_[entry_index].state == State::kOwned)
      keys.push_back(key_of(static_cast<std::int64_t>(entry_index)));
  return keys;
}

void Store::fail(Code code, const char* reason) {
  std::uint32_t expected = 0;
  if (!header_->failed.compare_exchange_strong(expected, 1)) return;
  header_->failure_code = code;
  std::strncpy(header_->failure, reason, sizeof header_->failure - 1);
  header_->failed.store(2, std::memory_order_release);
  lose({Loss::kFailed, static_cast<std::uint16_t>(header_->node), getpid()});
}

void Store::lose(const Loss& loss) {
  Loss none;
  header_->loss.compare_exchange_strong(none, loss);
}

void Store::leave_in_need() { lose({Loss::kLeft, static_cast<std::uint16_t>(header_->node), getpid()}); }

void Store::lose_worker(std::uint32_t worker) {
  lose({Loss::kKilled, static_cast<std::uint16_t>(header_->node), users_[kMaxChannels + worker].pid.load()});
}

bool Store::is_own_leave(const Loss& loss) const {
  return loss.how == Loss::kLeft && loss.node == header_->node && loss.process == getpid();
}

// A loss is why others then leave or shut down, so it is what is named; it is read after what it causes.
void Store::check_peers() const {
  const std::uint32_t departed_node = header_->departed_node.load(std::memory_order_acquire);
  const bool stopping = header_->stopping.load(std::memory_order_acquire) != 0;
  const Loss lost = loss();
  if (lost.how != Loss::kNone && !is_own_leave(lost)) throw_loss(lost);
  if (stopping || lost.how != Loss::kNone)
    throw Error(Code::kUnavailable, "parameters: node " + std::to_string(header_->node) +
                                        " has been shut down; nothing can be read or written any more");
  if (departed_node != 0) throw_loss({Loss::kLeft, static_cast<std::uint16_t>(departed_node - 1), 0});
}

void Store::throw_loss(const Loss& loss) const {
  const bool here = loss.node == header_->node;
  if (here && loss.how == Loss::kFailed) throw Error(header_->failure_code, header_->failure);
  const std::string node = "node " + std::to_string(loss.node);
  const std::string process = loss.process == 0 ? "it" : "process " + std::to_string(loss.process);
  const std::string lost =
      "parameters: " + node + " is lost (noticed by node " + std::to_string(header_->node) + "): " + process;
  std::string text;
  switch (loss.how) {
    case Loss::kNone:
    case Loss::kUnreachable:
      text = lost + " died, or could not be reached for longer than transport.peer_timeout_s";
      break;
    case Loss::kLeft:
      text = here ? "parameters: " + process + " of " + node + " has left while others still needed it"
                  : lost + " has left, or shut down, while others still needed it";
      text += "; see its own output for why";
      break;
    case Loss::kKilled:
      text = "parameters: " + process + " of " + node + " has died, and no other has taken its place";
      break;
    case Loss::kFailed: text = lost + " cannot serve it any more; see its own output for why"; break;
  }
  throw Error(Code::kPeerLost, text + "; restart from the last checkpoint", {static_cast<int>(loss.node)});
}

void Store::check_leader() const {
  check_peers();
  const ProcessId& leader = header_->leader;
  if (alive(leader)) return;
  check_peers();  // why it ended
  throw Error(Code::kPeerLost,
              "parameters: process " + std::to_string(leader.pid) + ", which serves node " +
                  std::to_string(header_->node) + ", has died; restart from the last checkpoint",
              {static_cast<int>(header_->node)});
}

std::vector<std::uint32_t> Store::dead_workers() const {
  std::vector<std::uint32_t> dead;
  for (std::uint32_t worker = 0; worker < kMaxWorkers; ++worker) {
    const User& user = users_[kMaxChannels + worker];
    if (user.pid.load() != 0 && !is_alive(user)) dead.push_back(worker);
  }
  return dead;
}

}  // namespace torchrelay::parameters
