// Reads and writes of files that run while the caller computes: io_uring, or Linux AIO where the kernel has no io_uring
// or a container forbids it. Files are opened with O_DIRECT by the caller, so the device moves the bytes itself.
//
// A transfer is one range of one file. It is split into pieces of at most `piece` bytes; at most `depth` pieces are with
// the kernel at once, so that a device sees a deep queue, and the others wait in order. All functions of one queue are
// called by one thread at a time.

#include <linux/aio_abi.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

namespace {

struct Piece {
    int64_t transfer;
    int file;
    bool writes;
    char* address;
    int64_t nbytes, offset;
};

struct Transfer {
    int64_t pieces = 0;
    int error = 0;
};

// The kernel's side of a queue. `result`: bytes moved, or a negative errno.
class Kernel {
public:
    virtual ~Kernel() = default;
    // Hands over a piece under a number below `depth`. Returns 0, or an errno.
    virtual int push(const Piece &piece, uint32_t number) = 0;
    // Waits until at least one piece is done, and calls `done` for each that is. Returns 0, or an errno.
    virtual int reap(bool wait, std::vector<std::pair<uint32_t, int64_t>> &done) = 0;
};

class Ring final : public Kernel {
public:
    // Throws an errno, after which the destructor frees what is there: the other constructor is done.
    explicit Ring(uint32_t depth) : Ring() {
        io_uring_params params{};
        fd_ = static_cast<int>(syscall(__NR_io_uring_setup, depth, &params));
        if (fd_ < 0) throw errno;
        // Since Linux 5.6, as are IORING_OP_READ and IORING_OP_WRITE, with which older kernels would fail each transfer.
        if (!(params.features & IORING_FEAT_RW_CUR_POS)) throw ENOSYS;
        submission_bytes_ = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
        completion_bytes_ = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
        entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
        submission_ = map(submission_bytes_, IORING_OFF_SQ_RING);
        completion_ = map(completion_bytes_, IORING_OFF_CQ_RING);
        entries_ = static_cast<io_uring_sqe*>(static_cast<void*>(map(entries_bytes_, IORING_OFF_SQES)));
        sq_tail_ = at(submission_, params.sq_off.tail);
        sq_mask_ = *at(submission_, params.sq_off.ring_mask);
        sq_array_ = at(submission_, params.sq_off.array);
        cq_head_ = at(completion_, params.cq_off.head);
        cq_tail_ = at(completion_, params.cq_off.tail);
        cq_mask_ = *at(completion_, params.cq_off.ring_mask);
        cqes_ = static_cast<io_uring_cqe*>(static_cast<void*>(completion_ + params.cq_off.cqes));
    }

    ~Ring() override {
        if (submission_) munmap(submission_, submission_bytes_);
        if (completion_) munmap(completion_, completion_bytes_);
        if (entries_) munmap(entries_, entries_bytes_);
        if (fd_ >= 0) close(fd_);
    }

    int push(const Piece &piece, uint32_t number) override {
        const uint32_t tail = *sq_tail_, index = tail & sq_mask_;
        io_uring_sqe &entry = entries_[index];
        entry = {};
        entry.opcode = piece.writes ? IORING_OP_WRITE : IORING_OP_READ;
        entry.fd = piece.file;
        entry.addr = reinterpret_cast<uint64_t>(piece.address);
        entry.len = static_cast<uint32_t>(piece.nbytes);
        entry.off = static_cast<uint64_t>(piece.offset);
        entry.user_data = number;
        sq_array_[index] = index;
        __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
        const int error = enter(1, 0);
        // The kernel has not taken it, and must not take it later.
        if (error) __atomic_store_n(sq_tail_, tail, __ATOMIC_RELEASE);
        return error;
    }

    int reap(bool wait, std::vector<std::pair<uint32_t, int64_t>> &done) override {
        for (;;) {
            uint32_t head = *cq_head_;
            const uint32_t tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
            for (; head != tail; ++head) {
                const io_uring_cqe &entry = cqes_[head & cq_mask_];
                done.emplace_back(static_cast<uint32_t>(entry.user_data), entry.res);
            }
            __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
            if (!done.empty() || !wait) return 0;
            if (const int error = enter(0, 1)) return error;
        }
    }

private:
    Ring() = default;

    char* map(size_t nbytes, off_t offset) {
        void* found = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, offset);
        if (found == MAP_FAILED) throw errno;
        return static_cast<char*>(found);
    }

    static uint32_t* at(char* base, uint32_t offset) {
        return static_cast<uint32_t*>(static_cast<void*>(base + offset));
    }

    int enter(uint32_t pushed, uint32_t wanted) {
        const unsigned flags = wanted ? IORING_ENTER_GETEVENTS : 0;
        while (syscall(__NR_io_uring_enter, fd_, pushed, wanted, flags, nullptr, 0) < 0) {
            // EAGAIN and EBUSY: the kernel lacks memory for a moment.
            if (errno != EINTR && errno != EAGAIN && errno != EBUSY) return errno;
        }
        return 0;
    }

    int fd_ = -1;
    char *submission_ = nullptr, *completion_ = nullptr;
    size_t submission_bytes_ = 0, completion_bytes_ = 0, entries_bytes_ = 0;
    io_uring_sqe* entries_ = nullptr;
    io_uring_cqe* cqes_ = nullptr;
    uint32_t *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    uint32_t sq_mask_ = 0, cq_mask_ = 0;
};

class LinuxAio final : public Kernel {
public:
    // Throws an errno.
    explicit LinuxAio(uint32_t depth) : blocks_(depth), events_(depth) {
        if (syscall(__NR_io_setup, depth, &context_) < 0) throw errno;
    }

    ~LinuxAio() override { syscall(__NR_io_destroy, context_); }

    int push(const Piece &piece, uint32_t number) override {
        iocb &block = blocks_[number];
        block = {};
        block.aio_data = number;
        block.aio_lio_opcode = piece.writes ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
        block.aio_fildes = static_cast<uint32_t>(piece.file);
        block.aio_buf = reinterpret_cast<uint64_t>(piece.address);
        block.aio_nbytes = static_cast<uint64_t>(piece.nbytes);
        block.aio_offset = piece.offset;
        iocb* list[] = {&block};
        while (syscall(__NR_io_submit, context_, 1, list) < 0) {
            if (errno != EINTR && errno != EAGAIN) return errno;
        }
        return 0;
    }

    int reap(bool wait, std::vector<std::pair<uint32_t, int64_t>> &done) override {
        long found;
        do {
            found = syscall(__NR_io_getevents, context_, wait ? 1 : 0, events_.size(), events_.data(), nullptr);
        } while (found < 0 && errno == EINTR);
        if (found < 0) return errno;
        for (long index = 0; index < found; ++index)
            done.emplace_back(static_cast<uint32_t>(events_[index].data), events_[index].res);
        return 0;
    }

private:
    aio_context_t context_ = 0;
    std::vector<iocb> blocks_;
    std::vector<io_event> events_;
};

class Queue {
public:
    Queue(std::unique_ptr<Kernel> kernel, uint32_t depth, int64_t piece)
        : kernel_(std::move(kernel)), pieces_(depth), largest_(piece) {
        for (uint32_t number = depth; number > 0; --number) free_.push_back(number - 1);
    }

    void start(int64_t transfer, int file, bool writes, char* address, int64_t nbytes, int64_t offset) {
        Transfer &own = transfers_[transfer];
        for (int64_t first = 0; first < nbytes; first += largest_) {
            const int64_t own_bytes = std::min(largest_, nbytes - first);
            waiting_.push_back({transfer, file, writes, address + first, own_bytes, offset + first});
            ++own.pieces;
        }
        take(false);
        push();
    }

    // Waits for a transfer, forgets it, and returns its errno.
    int finish(int64_t transfer) {
        const auto found = transfers_.find(transfer);
        if (found == transfers_.end()) return 0;
        while (found->second.pieces > 0) {
            push();
            take(true);
        }
        push();
        const int error = found->second.error;
        transfers_.erase(found);
        return error;
    }

private:
    void push() {
        while (!waiting_.empty() && !free_.empty()) {
            const Piece piece = waiting_.front();
            waiting_.pop_front();
            const uint32_t number = free_.back();
            if (const int error = kernel_->push(piece, number)) {
                end(piece.transfer, error);
                continue;
            }
            free_.pop_back();
            pieces_[number] = piece;
        }
    }

    void take(bool wait) {
        // Without a piece at the kernel there is nothing to wait for.
        if (free_.size() == pieces_.size()) return;
        done_.clear();
        if (const int error = kernel_->reap(wait, done_)) {
            for (auto &[transfer, state] : transfers_) state = {0, error};
            waiting_.clear();
            return;
        }
        for (const auto &[number, result] : done_) {
            free_.push_back(number);
            Piece piece = pieces_[number];
            if (result < 0 && result != -EINTR && result != -EAGAIN) {
                end(piece.transfer, static_cast<int>(-result));
            } else if (result == 0) {
                // A file that is shorter than the caller made it.
                end(piece.transfer, EIO);
            } else if (result == piece.nbytes) {
                end(piece.transfer, 0);
            } else {
                const int64_t moved = std::max<int64_t>(result, 0);
                waiting_.push_front({piece.transfer, piece.file, piece.writes, piece.address + moved,
                                     piece.nbytes - moved, piece.offset + moved});
            }
        }
    }

    void end(int64_t transfer, int error) {
        Transfer &own = transfers_[transfer];
        --own.pieces;
        if (error && !own.error) own.error = error;
    }

    std::unique_ptr<Kernel> kernel_;
    std::vector<Piece> pieces_;
    std::vector<uint32_t> free_;
    std::deque<Piece> waiting_;
    std::unordered_map<int64_t, Transfer> transfers_;
    std::vector<std::pair<uint32_t, int64_t>> done_;
    int64_t largest_;
};

}  // namespace

extern "C" {

// Writes to `opened`: the queue's address, or 0 and an errno. aio: use Linux AIO and not io_uring.
void queue_open(int64_t depth, int64_t piece, int64_t aio, int64_t* opened) {
    try {
        std::unique_ptr<Kernel> kernel;
        if (aio) kernel = std::make_unique<LinuxAio>(static_cast<uint32_t>(depth));
        else kernel = std::make_unique<Ring>(static_cast<uint32_t>(depth));
        opened[0] = reinterpret_cast<int64_t>(new Queue(std::move(kernel), static_cast<uint32_t>(depth), piece));
        opened[1] = 0;
    } catch (int error) {
        opened[0] = 0;
        opened[1] = error;
    }
}

// Starts to read `nbytes` at `offset` of `file` into `address`, or to write them.
void queue_start(Queue* queue, int64_t transfer, int64_t file, int64_t writes, char* address, int64_t nbytes,
                 int64_t offset) {
    queue->start(transfer, static_cast<int>(file), writes != 0, address, nbytes, offset);
}

// Waits until `transfer` is done, and writes its errno, or 0, to `error`.
void queue_finish(Queue* queue, int64_t transfer, int64_t* error) { *error = queue->finish(transfer); }

void queue_close(Queue* queue) { delete queue; }
}
