#include "apps/signals.h"

#include <unistd.h>

#include <utility>

#include "apps/say.h"

namespace colibri {

Signals::Signals() {
  sigemptyset(&set_);
  for (int signal : {SIGINT, SIGTERM, SIGUSR2}) sigaddset(&set_, signal);
  // A terminal that closes ends the run too, unless whoever started it said not to (nohup).
  struct sigaction hangup {};
  if (sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler != SIG_IGN) {
    sigaddset(&set_, SIGHUP);
  }
  pthread_sigmask(SIG_BLOCK, &set_, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  thread_ = std::thread([this] { Loop(); });
}

Signals::~Signals() {
  done_ = true;
  pthread_kill(thread_.native_handle(), SIGUSR2);
  thread_.join();
}

void Signals::OnFirst(std::function<void()> stop) {
  const std::lock_guard lock(mutex_);
  stop_ = std::move(stop);
}

void Signals::Loop() {
  for (;;) {
    int signal = 0;
    if (sigwait(&set_, &signal) != 0 || done_) return;
    if (signal == SIGUSR2) continue;
    const std::lock_guard lock(mutex_);
    // Kernel and shell may both tell of one closed terminal: that is no wish for more haste.
    if (signal == SIGHUP && count_ > 0 && stop_) continue;
    if (count_++ > 0 || !stop_) {
      ShowStatus("");
      _exit(130);
    }
    Say("interrupted: finishing this sweep; once more to stop at once");
    stop_();
  }
}

}  // namespace colibri
