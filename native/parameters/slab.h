// A node's mapped slab: its users, entries and classes.
//
// Nothing here blocks. Entries and rows change through LockedEntry; other nodes are known only as ids in
// entries.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "parameters/mark_set.h"
#include "parameters/slab_layout.h"
#include "parameters/store_spec.h"

namespace torchrelay {

class SharedMemory;

namespace parameters {

class Slab {
 public:
  // New memory, of which this process becomes the leader. Others attach after publish().
  static Slab create(const StoreSpec& spec);
  // The memory of another process of this host.
  static Slab attach(const std::string& address);
  void publish();

  Slab(Slab&& other) noexcept;
  ~Slab();

  std::string address() const;
  std::byte* at(std::uint64_t offset) const { return reinterpret_cast<std::byte*>(header_) + offset; }
  SlabHeader& header() { return *header_; }
  const SlabHeader& header() const { return *header_; }
  User* users() { return users_; }
  const User* users() const { return users_; }

  Entry& entry(std::int64_t entry_index) { return entries_[entry_index]; }
  const Entry& entry(std::int64_t entry_index) const { return entries_[entry_index]; }
  // Entries of the channel that a round must visit: a replica has something to send, or a shared key
  // something that its replicas lack. Marked, under the entry's lock, before the entry shows it.
  MarkSet changed(std::uint32_t channel) const {
    return {at(header_->changed_offset + channel * header_->changed_bytes), header_->channel_entries};
  }
  std::int64_t key_of(std::int64_t entry_index) const {
    return header_->dynamic() ? keys_[entry_index].load() : entry_index;
  }
  // A dynamic table's keys by entry index; null if the table is dense.
  std::atomic<std::int64_t>* keys() const { return keys_; }
  // The epoch of the entry's owner; set by LockedEntry::set_owner.
  std::uint32_t ownership_epoch(std::int64_t entry_index,
                                std::memory_order order = std::memory_order_relaxed) const {
    return epochs_[entry_index].load(order);
  }
  void prefetch_location(std::int64_t key) const {
    if (!header_->dynamic()) __builtin_prefetch(&epochs_[key]);
  }

  // Keys with rows of equal length; see slab_layout.h.
  bool has_one_class() const { return class_of_ == nullptr; }
  std::uint32_t class_index(std::int64_t entry_index) const {
    return has_one_class() ? 0 : class_of_[entry_index];
  }
  const ClassInfo& class_at(std::uint32_t class_index) const { return classes_[class_index]; }
  const ClassInfo& class_of(std::int64_t entry_index) const { return class_at(class_index(entry_index)); }
  Pool& pool(std::uint32_t class_index) const { return pools_[class_index]; }

  void count(std::uint32_t user_id, Stat stat, std::uint64_t amount) {
    auto& cell = header_->stats[user_id][stat];  // one writer
    cell.store(cell.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  }
  // Over all users.
  std::uint64_t total(Stat stat) const;

 private:
  friend class LockedEntry;

  explicit Slab(SharedMemory memory);
  void map();

  std::unique_ptr<SharedMemory> memory_;
  SlabHeader* header_;
  User* users_ = nullptr;
  ClassInfo* classes_ = nullptr;
  Pool* pools_ = nullptr;
  Entry* entries_ = nullptr;
  std::atomic<std::uint32_t>* epochs_ = nullptr;
  std::uint16_t* class_of_ = nullptr;          // null: one class
  std::atomic<std::int64_t>* keys_ = nullptr;  // null: dense
};

}  // namespace parameters
}  // namespace torchrelay
