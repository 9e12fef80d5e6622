#include "io/read_hub.h"

#include <string>
#include <utility>

#include "io/check.h"

namespace colibri {

class ReadHub::Port final : public Reader {
 public:
  Port(ReadHub& hub, uint64_t number) : hub_(hub), number_(number) {}
  ~Port() override {
    if (started_) Stop();
  }

  void Start(ReadDone done) override {
    COLIBRI_CHECK(!started_);
    started_ = true;
    hub_.Start(number_, std::move(done));
  }
  void Submit(const ReadJob& job) override {
    ReadJob tagged = job;
    tagged.id = Tagged(job.id);
    hub_.reader_.Submit(tagged);
  }
  void Promote(uint64_t id) override { hub_.reader_.Promote(Tagged(id)); }
  bool Cancel(uint64_t id) override { return hub_.reader_.Cancel(Tagged(id)); }
  void CutShort(uint64_t id) override { hub_.reader_.CutShort(Tagged(id)); }
  void Stop() override { hub_.Stop(); }
  ReaderStats Stats() const override { return hub_.reader_.Stats(); }
  std::string Name() const override { return hub_.reader_.Name(); }

 private:
  uint64_t Tagged(uint64_t id) const {
    COLIBRI_CHECK(id >> kIdBits == 0);
    return number_ << kIdBits | id;
  }

  ReadHub& hub_;
  const uint64_t number_;
  bool started_ = false;
};

std::unique_ptr<Reader> ReadHub::AddPort() {
  const std::lock_guard lock(mutex_);
  COLIBRI_CHECK(ports_ < kMaxPorts);
  return std::make_unique<Port>(*this, ports_++);
}

void ReadHub::Start(uint64_t port, ReadDone done) {
  done_[port] = std::move(done);
  const std::lock_guard lock(mutex_);
  if (started_ || stopped_) return;
  started_ = true;
  reader_.Start([this](uint64_t id, const ReadResult& result) {
    done_[id >> kIdBits](id & ((uint64_t{1} << kIdBits) - 1), result);
  });
}

void ReadHub::Stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  // Whoever comes second waits for the first: no callback runs after either returns.
  std::call_once(stop_once_, [this] { reader_.Stop(); });
}

}  // namespace colibri
