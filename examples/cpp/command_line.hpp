// The command line of the example programs: the options of plugrl-env-client, as far as they apply here.
#ifndef PLUGRL_COMMAND_LINE_HPP
#define PLUGRL_COMMAND_LINE_HPP

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "plugrl_client.hpp"

namespace command_line {

struct Arguments {
    plugrl::Options options;
    long num_envs = 1, action_dim = 7;
};

[[noreturn]] inline void fail(const char* option, const char* why) {
    std::fprintf(stderr, "%s %s; see docs/cpp-client.md\n", option, why);
    std::exit(2);
}
inline void show(bool, const std::string& text) {
    std::fprintf(stderr, "%s\n", text.c_str());
}
inline void show_warning(bool warning, const std::string& text) {
    if (warning) show(warning, text);
}

inline Arguments parse(int argc, char** argv) {
    Arguments found;
    plugrl::Options& options = found.options;
    options.log = show;
    if (const char* key = std::getenv("PLUGRL_API_KEY")) options.api_key = key;
    for (int i = 1; i < argc; ++i) {
        const char* name = argv[i];
        const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
        if (is("--no-reuse") || is("--reuse")) {
            options.reuse = is("--reuse");
        } else if (is("--quiet")) {
            options.log = show_warning;
        } else if (is("--help")) {
            std::puts("options: see docs/cpp-client.md");
            std::exit(0);
        } else if (++i == argc) {
            fail(name, "lacks its value");
        } else if (is("--url")) {
            options.url = argv[i];
        } else if (is("--api-key")) {
            options.api_key = argv[i];
        } else {
            char* end = nullptr;
            const double number = std::strtod(argv[i], &end);
            const bool positive = is("--num-envs") || is("--action-dim");
            const bool whole = positive || is("--seed") || is("--rank");
            const double most = is("--seed") ? 9e15 : positive ? 1e5 : 1e9;
            const bool in_range = number >= positive && number <= most;  // no NaN is
            if (end == argv[i] || *end != '\0' || !in_range) fail(name, "is out of range");
            if (whole && number != std::floor(number)) fail(name, "is no whole number");
            if (is("--num-envs"))
                found.num_envs = static_cast<long>(number);
            else if (is("--action-dim"))
                found.action_dim = static_cast<long>(number);
            else if (is("--seed"))
                options.seed = static_cast<std::uint64_t>(number);
            else if (is("--rank"))
                options.rank = static_cast<std::uint32_t>(number);
            else if (is("--connect-timeout"))
                options.connect_timeout = number;
            else if (is("--ping-interval"))
                options.ping_interval = number;
            else if (is("--ping-timeout"))
                options.ping_timeout = number;
            else if (is("--send-timeout"))
                options.send_timeout = number;
            else
                fail(name, "is unknown");
        }
    }
    return found;
}

// The client and the signal that it is to hear.
inline plugrl::Client* running = nullptr;
inline volatile std::sig_atomic_t received = 0;

inline void stop(int signal) {
    if (received != 0) std::signal(signal, SIG_DFL);  // whoever insists gets the end that a signal brings by itself
    received = signal;
    running->stop();
}
// While it lives, SIGINT and SIGTERM go to a client.
struct Listening {
    explicit Listening(plugrl::Client& client) {
        running = &client;
        for (const int number : {SIGINT, SIGTERM}) std::signal(number, stop);
    }
    Listening(const Listening&) = delete;
    ~Listening() {
        for (const int number : {SIGINT, SIGTERM}) std::signal(number, SIG_DFL);
    }
};

// Run the client; SIGINT and SIGTERM end it cleanly. Gives the exit status.
inline int serve(plugrl::Options options, plugrl::Envs envs) {
    int status = 0;
    try {
        plugrl::Client client(std::move(options), std::move(envs));
        try {
            const Listening listening(client);
            client.run();
        } catch (const std::exception& error) {
            show(true, error.what());
            status = 1;
        }
        const plugrl::Summary& done = client.summary();
        const std::size_t counted = std::min<std::size_t>(10, done.returns.size());
        double total = 0;
        for (std::size_t i = done.returns.size() - counted; i < done.returns.size(); ++i) total += done.returns[i];
        std::printf(
            "steps=%lld episodes=%lld last_ten_mean=%.17g mean=%.17g reconnects=%lld\n",
            static_cast<long long>(done.steps), static_cast<long long>(done.episodes),
            total / static_cast<double>(std::max<std::size_t>(1, counted)),
            done.total_return / static_cast<double>(std::max<std::int64_t>(1, done.episodes)),  // a mean of none is 0
            static_cast<long long>(done.reconnects));
    } catch (const plugrl::UsageError& error) {
        show(true, error.what());
        status = 2;
    } catch (const std::exception& error) {
        show(true, error.what());
        status = 1;
    }
    return received != 0 ? 128 + received : status;
}

}  // namespace command_line

#endif
