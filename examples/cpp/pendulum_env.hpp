// Gymnasium's Pendulum-v1, bit for bit: dynamics, rounding, time limit, and the states that a seeded reset draws.
//
// Compile with -ffp-contract=off: a fused multiply-add rounds once where NumPy rounds twice.
#ifndef PLUGRL_PENDULUM_ENV_HPP
#define PLUGRL_PENDULUM_ENV_HPP

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "plugrl_client.hpp"

// numpy.random.Generator(PCG64(SeedSequence(seed))), as far as uniform() needs it.
class NumpyRandom {
public:
    // Seed with 32-bit words, the lowest first.
    explicit NumpyRandom(std::vector<std::uint32_t> entropy) {
        while (entropy.size() > 1 && entropy.back() == 0) entropy.pop_back();
        std::uint32_t hash = 0x43b0d7e5;
        const auto hashed = [&hash](std::uint32_t value) {
            value ^= hash;
            hash *= 0x931e8875;
            value *= hash;
            return value ^ value >> 16;
        };
        const auto mix = [](std::uint32_t x, std::uint32_t y) {
            const std::uint32_t mixed = 0xca01f9dd * x - 0x4973f715 * y;
            return mixed ^ mixed >> 16;
        };
        std::array<std::uint32_t, 4> pool{};
        for (std::size_t i = 0; i < pool.size(); ++i) pool[i] = hashed(i < entropy.size() ? entropy[i] : 0);
        for (std::size_t from = 0; from < pool.size(); ++from)
            for (std::size_t to = 0; to < pool.size(); ++to)
                if (from != to) pool[to] = mix(pool[to], hashed(pool[from]));
        for (std::size_t from = pool.size(); from < entropy.size(); ++from)
            for (std::uint32_t& word : pool) word = mix(word, hashed(entropy[from]));
        std::array<std::uint64_t, 4> seeds{};
        std::uint32_t out_hash = 0x8b51f9dd;
        for (std::size_t i = 0; i < 8; ++i) {
            std::uint32_t word = pool[i % 4] ^ out_hash;
            out_hash *= 0x58f38ded;
            word *= out_hash;
            word ^= word >> 16;
            seeds[i / 2] |= static_cast<std::uint64_t>(word) << (32 * (i % 2));
        }
        increment_ = (static_cast<Wide>(seeds[2]) << 64 | seeds[3]) << 1 | 1;
        state_ = increment_ + (static_cast<Wide>(seeds[0]) << 64 | seeds[1]);
        state_ = state_ * multiplier() + increment_;
    }

    // A double in [low, high).
    double uniform(double low, double high) {
        state_ = state_ * multiplier() + increment_;
        const std::uint64_t folded = static_cast<std::uint64_t>(state_ >> 64) ^ static_cast<std::uint64_t>(state_);
        const auto turn = static_cast<unsigned>(state_ >> 122);
        const std::uint64_t bits = folded >> turn | folded << (-turn & 63);
        return low + (high - low) * (static_cast<double>(bits >> 11) * (1.0 / 9007199254740992.0));
    }

private:
    __extension__ typedef unsigned __int128 Wide;
    static Wide multiplier() { return static_cast<Wide>(0x2360ed051fc65da4) << 64 | 0x4385df649fccf645; }
    Wide state_ = 0, increment_ = 0;
};

class Pendulum : public plugrl::Env {
public:
    plugrl::Spec spec() const override {
        plugrl::Spec spec;
        spec.observation = {{"", plugrl::box<float>({3}, {-1.0F, -1.0F, -8.0F}, {1.0F, 1.0F, 8.0F})}};
        spec.action = plugrl::box<float>({1}, -2.0F, 2.0F);
        spec.env_id = "Pendulum-v1";
        spec.max_episode_steps = time_limit;
        return spec;
    }

    void reset(const plugrl::Seed& seed, plugrl::Observation& first) override {
        if (seed) random_ = NumpyRandom({static_cast<std::uint32_t>(*seed), static_cast<std::uint32_t>(*seed >> 32)});
        const double angle = random_.uniform(-pi, pi);
        const double speed = random_.uniform(-1.0, 1.0);
        begin(angle, speed);
        observe(first);
    }

    // Begin an episode in this state.
    void begin(double angle, double speed) {
        angle_ = angle;
        speed_ = speed;
        steps_ = 0;
    }

    plugrl::Step step(const plugrl::Action& action, plugrl::Observation& next) override {
        const double normal = modulo(angle_ + pi, 2 * pi) - pi;
        double cost = squared(normal) + 0.1 * squared(speed_);
        double push = 0;
        if (action.is_float32()) {  // NumPy 2 computes with a float32 and a Python number in float32
            const float torque = std::clamp(static_cast<float>(action[0]), -2.0F, 2.0F);
            cost += static_cast<double>(0.001F * squared(torque));
            push = static_cast<double>(3.0F * torque);
        } else {
            const double torque = std::clamp(action[0], -2.0, 2.0);
            cost += 0.001 * squared(torque);
            push = 3.0 * torque;
        }
        speed_ = std::clamp(speed_ + (15.0 * std::sin(angle_) + push) * 0.05, -8.0, 8.0);
        angle_ += speed_ * 0.05;
        observe(next);
        plugrl::Step done;
        done.reward = -cost;
        done.truncated = ++steps_ >= time_limit;
        return done;
    }

private:
    static constexpr double pi = 3.141592653589793;
    static constexpr int time_limit = 200;

    // Python's and NumPy's %: the result has the sign of the divisor.
    static double modulo(double x, double divisor) {
        const double rest = std::fmod(x, divisor);
        if (rest == 0.0) return std::copysign(0.0, divisor);
        return (rest < 0) != (divisor < 0) ? rest + divisor : rest;
    }
    // NumPy's x**2 of a scalar asks the C library's pow, which is not always x * x; the exponent is kept from the
    // compiler.
    template <class T>
    static T squared(T x) {
        const volatile T two = 2;
        return std::pow(x, two);
    }
    static std::vector<std::uint32_t> entropy() {
        std::random_device random;
        return {random(), random(), random(), random()};
    }
    void observe(plugrl::Observation& out) const {
        out.set(0, {static_cast<float>(std::cos(angle_)), static_cast<float>(std::sin(angle_)),
                    static_cast<float>(speed_)});
    }

    double angle_ = 0, speed_ = 0;
    int steps_ = 0;
    NumpyRandom random_{entropy()};
};

#endif
