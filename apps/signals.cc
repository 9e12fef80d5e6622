#include "apps/signals.h"

#include <unistd.h>

#include <utility>

#include "apps/say.h"

namespace colibri {

Signals::Signals() {
  sigemptyset(&set_);
  sigaddset(&set_, SIGUSR2);
  // A terminal that closes ends the run too. But what whoever started us ignores stays ignored:
  // nohup does so with SIGHUP, a shell without job control with SIGINT of what it puts behind.
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    struct sigaction how {};
    if (sigaction(signal, nullptr, &how) == 0 && how.sa_handler != SIG_IGN) {
      sigaddset(&set_, signal);
    }
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

void Signals::OnFirst(std::function<void()> stop, std::function<std::string()> state) {
  const std::lock_guard lock(mutex_);
  stop_ = std::move(stop);
  state_ = std::move(state);
}

void Signals::Loop() {
  for (;;) {
    int signal = 0;
    if (sigwait(&set_, &signal) != 0 || done_) return;
    if (signal == SIGUSR2) continue;
    const std::lock_guard lock(mutex_);
    // Never Say: whoever reads our notes may have stopped doing so, and the next signal counts.
    if (signal == SIGQUIT) {
      SayOrGiveUp(state_ ? state_() : "state: nothing runs\n");
      continue;
    }
    // Kernel and shell may both tell of one closed terminal: that is no wish for more haste.
    if (signal == SIGHUP && count_ > 0 && stop_) continue;
    if (count_++ > 0 || !stop_) {
      SayOrGiveUp("");
      _exit(130);
    }
    SayOrGiveUp("interrupted: finishing this sweep; once more to stop at once\n");
    stop_();
  }
}

}  // namespace colibri
