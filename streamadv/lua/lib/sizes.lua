-- What trajectories of this run need, and what is reserved for the free slots of open groups.
-- KEYS  sizes
-- The hash `sizes` of a shard:
--   'h<b>'      trajectories pushed that have at most 2^(b/4) bytes, by the mean of their packet, and do not fit below;
--               older ones count less and less
--   'n'         the sum of these
--   'in', 'out' payload bytes that results were computed for, and bytes of these results
--   'u<bytes>'  free slots of open groups, by the bytes a slot needed when its group was opened
local SIZES_KNOWN = 8  -- trajectories after which their sizes count; until then a slot needs max_trajectory_bytes
local SIZES_FORGET = 4096  -- at so many all counts are halved
local SIZES_RARE = 0.01  -- the share of trajectories that may be larger than what a slot needs
local SIZES_MOST = 240  -- buckets above would be of payloads that no server holds

local function size_bound(bucket) return math.ceil(2 ^ (math.min(bucket, SIZES_MOST) / 4)) end

local function size_bucket(bytes)
  local bucket = math.max(0, math.ceil(4 * math.log(math.max(1, bytes)) / math.log(2)))
  while size_bound(bucket) < bytes and bucket < SIZES_MOST do bucket = bucket + 1 end
  return bucket
end

local function read_sizes(key)
  local flat, counts = redis.call('HGETALL', key), {payloads = {}, free = {}, n = 0, into = 0, out = 0}
  for i = 1, #flat, 2 do
    local kind, number = string.match(flat[i], '^([hu])(%d+)$')
    local count = tonumber(flat[i + 1]) or 0
    if kind and #number > 15 then kind = nil end
    if kind == 'h' then counts.payloads[tonumber(number)] = count end
    if kind == 'u' then counts.free[tonumber(number)] = count end
    if flat[i] == 'n' then counts.n = count elseif flat[i] == 'in' then counts.into = count
    elseif flat[i] == 'out' then counts.out = count end
  end
  return counts
end

-- Bytes that a slot needs now: those of nearly all payloads, and as many for results as they have had so far.
local function slot_bytes(counts, max_trajectory_bytes)
  if counts.n < SIZES_KNOWN then return max_trajectory_bytes end
  local buckets, larger = {}, 0
  for bucket in pairs(counts.payloads) do buckets[#buckets + 1] = bucket end
  table.sort(buckets, function(a, b) return a > b end)
  for _, bucket in ipairs(buckets) do
    larger = larger + counts.payloads[bucket]
    if larger > SIZES_RARE * counts.n then
      local bytes = size_bound(bucket)
      if counts.into > 0 and counts.out > 0 then bytes = size_bound(size_bucket(bytes * (1 + counts.out / counts.into))) end
      return math.min(max_trajectory_bytes, bytes)
    end
  end
  return max_trajectory_bytes
end

local pushed = {}  -- sizes that this call has to note: field -> count

-- Bytes reserved for all free slots: `bytes_now` each, or what a slot needed when its group was opened if that is more.
local function reserved_bytes(counts, bytes_now)
  local sum = 0
  for bytes, count in pairs(counts.free) do sum = sum + math.max(bytes, bytes_now) * count end
  for bytes, count in pairs(free) do sum = sum + math.max(bytes, bytes_now) * count end
  return sum
end

-- A packet was pushed: its members count as of the same size.
local function note_size(bytes, members)
  local field = 'h' .. size_bucket(bytes / members)
  pushed[field] = (pushed[field] or 0) + members
end

local function forget_half(key)
  local forgotten = 0
  for bucket, count in pairs(read_sizes(key).payloads) do
    local half = math.ceil(count / 2)
    forgotten = forgotten + half
    if add(key, 'h' .. bucket, -half) == 0 then redis.call('HDEL', key, 'h' .. bucket) end
  end
  add(key, 'n', -forgotten)
end

-- Write what this call has noted.
local function write_sizes()
  local members = 0
  for field, count in pairs(pushed) do
    add(keys.sizes, field, count)
    members = members + count
  end
  if members > 0 and add(keys.sizes, 'n', members) >= SIZES_FORGET then forget_half(keys.sizes) end
end
