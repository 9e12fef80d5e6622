#include "runtime/ordered_release.h"

#include <utility>

#include "io/check.h"

namespace colibri {

void OrderedRelease::Expect(uint64_t line) {
  const std::lock_guard lock(mutex_);
  COLIBRI_CHECK(expected_.empty() || expected_.back() < line);
  expected_.push_back(line);
}

void OrderedRelease::EmitFirst(std::map<uint64_t, Held>::iterator it) {
  bytes_ -= it->second.record.size();
  emit_(std::move(it->second.record), it->second.token, std::move(it->second.outcome));
  held_.erase(it);
}

void OrderedRelease::Finish(uint64_t line, std::string record, uint32_t token, Line outcome) {
  const std::lock_guard lock(mutex_);
  COLIBRI_CHECK(!expected_.empty());
  if (line != expected_.front() && bytes_ + record.size() <= cap_) {
    emit_({}, token, nullptr);
    token = no_token_;
  }
  bytes_ += record.size();
  held_.emplace(line, Held{std::move(record), token, std::move(outcome)});
  while (!expected_.empty()) {
    const auto first = held_.find(expected_.front());
    if (first == held_.end()) break;
    expected_.pop_front();
    EmitFirst(first);
  }
}

void OrderedRelease::Flush() {
  const std::lock_guard lock(mutex_);
  while (!held_.empty()) EmitFirst(held_.begin());
  expected_.clear();
}

size_t OrderedRelease::HeldBytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

}  // namespace colibri
