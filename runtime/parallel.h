// How stages run a loop over independent pieces: serially (the reference engine) or as an isolated
// TBB loop (the graph supplies that one). Results never depend on which, on the grain or on the
// thread count: pieces write to disjoint places.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

namespace colibri {

// A reference to a callable void(size_t begin, size_t end); lives as long as the call.
class RangeBody {
 public:
  template <class F, class = std::enable_if_t<!std::is_same_v<std::decay_t<F>, RangeBody>>>
  RangeBody(F&& f)  // NOLINT(google-explicit-constructor)
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))),
        call_([](void* object, size_t begin, size_t end) {
          (*static_cast<std::remove_reference_t<F>*>(object))(begin, end);
        }) {}
  void operator()(size_t begin, size_t end) const { call_(object_, begin, end); }

 private:
  void* object_;
  void (*call_)(void*, size_t, size_t);
};

class Parallel {
 public:
  virtual ~Parallel() = default;
  // Calls body on pieces of [0, count), each at least min(grain, count) long. Returns when all ran.
  virtual void For(size_t count, size_t grain, RangeBody body) = 0;
  // Threads that may run bodies at once; ThreadIndex() of the caller is below it.
  virtual int Threads() const = 0;
  virtual int ThreadIndex() const = 0;
};

class SerialParallel final : public Parallel {
 public:
  void For(size_t count, size_t /*grain*/, RangeBody body) override {
    if (count > 0) body(0, count);
  }
  int Threads() const override { return 1; }
  int ThreadIndex() const override { return 0; }
};

}  // namespace colibri
