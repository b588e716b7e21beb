// The command line of the example programs: the options of plugrl-env-client, as far as they apply here.
#ifndef PLUGRL_COMMAND_LINE_HPP
#define PLUGRL_COMMAND_LINE_HPP

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "plugrl_client.hpp"

namespace command_line {

struct Arguments {
    plugrl::Options options;
    long num_envs = 1;
    long action_dim = 7;
    bool quiet = false;
};

inline Arguments parse(int argc, char** argv) {
    Arguments found;
    plugrl::Options& options = found.options;
    const auto fail = [argv](const std::string& why) {
        std::fprintf(stderr,
                     "%s: %s\nusage: %s [--url ws://host:port] [--num-envs N] [--seed N] [--rank N] [--api-key KEY] [--no-reuse]\n"
                     "    [--connect-timeout S] [--ping-interval S] [--ping-timeout S] [--action-dim N] [--quiet]\n",
                     argv[0], why.c_str(), argv[0]);
        std::exit(2);
    };
    if (const char* key = std::getenv("PLUGRL_API_KEY")) options.api_key = key;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        if (name == "--reuse" || name == "--no-reuse") {
            options.reuse = name == "--reuse";
        } else if (name == "--quiet") {
            found.quiet = true;
        } else if (i + 1 == argc) {
            fail(name + " is unknown, or lacks its value");
        } else {
            const char* value = argv[++i];
            char* end = nullptr;
            errno = 0;
            if (name == "--url") {
                options.url = value;
            } else if (name == "--api-key") {
                options.api_key = value;
            } else if (name == "--connect-timeout" || name == "--ping-interval" || name == "--ping-timeout") {
                const double seconds = std::strtod(value, &end);
                if (end == value || *end != '\0') fail(name + " takes seconds, not " + value);
                (name == "--connect-timeout" ? options.connect_timeout : name == "--ping-interval" ? options.ping_interval : options.ping_timeout) = seconds;
            } else {
                const long number = std::strtol(value, &end, 10);
                const long least = name == "--num-envs" || name == "--action-dim" ? 1 : 0;
                if (end == value || *end != '\0' || errno != 0 || number < least) fail(name + " takes a whole number of at least " + std::to_string(least) + ", not " + value);
                if (name == "--num-envs") found.num_envs = number;
                else if (name == "--action-dim") found.action_dim = number;
                else if (name == "--seed") options.seed = static_cast<std::uint64_t>(number);
                else if (name == "--rank") options.rank = static_cast<std::uint32_t>(number);
                else fail(name + " is unknown");
            }
        }
    }
    return found;
}

inline plugrl::Client*& running() {
    static plugrl::Client* client = nullptr;
    return client;
}

// Run the client; SIGINT and SIGTERM end it cleanly. Gives the exit status.
inline int serve(Arguments arguments, std::vector<std::unique_ptr<plugrl::Env>> envs) {
    static volatile std::sig_atomic_t received = 0;
    const bool quiet = arguments.quiet;
    arguments.options.log = [quiet](bool warning, const std::string& text) {
        if (warning || !quiet) std::fprintf(stderr, "%s\n", text.c_str());
    };
    try {
        plugrl::Client client(arguments.options, std::move(envs));
        running() = &client;
        for (const int number : {SIGINT, SIGTERM}) {
            std::signal(number, [](int caught) {
                received = caught;
                running()->stop();
            });
        }
        int status = 0;
        try {
            client.run();
        } catch (const std::exception& error) {
            std::fprintf(stderr, "%s\n", error.what());
            status = 1;
        }
        for (const int number : {SIGINT, SIGTERM}) std::signal(number, SIG_DFL);
        const plugrl::Summary& done = client.summary();
        double total = 0;
        std::size_t counted = 0;
        for (auto one = done.returns.rbegin(); one != done.returns.rend() && counted < 10; ++one, ++counted) total += *one;
        std::printf("steps=%lld episodes=%lld last_ten_mean=%.17g mean=%.17g reconnects=%lld\n", static_cast<long long>(done.steps),
                    static_cast<long long>(done.episodes), total / static_cast<double>(counted),
                    done.total_return / static_cast<double>(done.episodes), static_cast<long long>(done.reconnects));
        return received != 0 ? 128 + received : status;
    } catch (const plugrl::UsageError& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 2;
    }
}

}  // namespace command_line

#endif
