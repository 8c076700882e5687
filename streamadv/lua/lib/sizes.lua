-- What trajectories of this run need, and what is reserved for the slots of open groups that no record has filled.
-- The hash `sizes` of a shard:
--   'h<b>'      payloads pushed that have at most 2^(b/4) bytes, and do not fit below; older ones count less and less
--   'n'         the sum of these
--   'in', 'out' payload bytes that results were computed for, and bytes of these results
--   'u<bytes>'  unfilled slots of open groups, by the bytes a slot needed when its group was opened
local SIZES_KNOWN = 8  -- payloads after which their sizes count; until then a slot needs max_trajectory_bytes
local SIZES_FORGET = 4096  -- at so many all counts are halved
local SIZES_RARE = 0.01  -- the share of payloads that may be larger than what a slot needs

local SIZES_MOST = 240  -- buckets above would be of payloads that no server holds

local function size_bound(bucket) return math.ceil(2 ^ (math.min(bucket, SIZES_MOST) / 4)) end

local function size_bucket(bytes)
  local bucket = math.max(0, math.ceil(4 * math.log(math.max(1, bytes)) / math.log(2)))
  while size_bound(bucket) < bytes and bucket < SIZES_MOST do bucket = bucket + 1 end
  return bucket
end

local function read_sizes(key)
  local flat, known = redis.call('HGETALL', key), {payloads = {}, unfilled = {}, n = 0, into = 0, out = 0}
  for i = 1, #flat, 2 do
    local kind, number = string.match(flat[i], '^([hu])(%d+)$')
    local count = tonumber(flat[i + 1]) or 0
    if kind and #number > 15 then kind = nil end
    if kind == 'h' then known.payloads[tonumber(number)] = count end
    if kind == 'u' then known.unfilled[tonumber(number)] = count end
    if flat[i] == 'n' then known.n = count elseif flat[i] == 'in' then known.into = count
    elseif flat[i] == 'out' then known.out = count end
  end
  return known
end

-- Bytes that a slot needs now: those of nearly all payloads, and as many for results as they have had so far.
local function slot_bytes(known, max_trajectory_bytes)
  if known.n < SIZES_KNOWN then return max_trajectory_bytes end
  local buckets, larger = {}, 0
  for bucket in pairs(known.payloads) do buckets[#buckets + 1] = bucket end
  table.sort(buckets, function(a, b) return a > b end)
  for _, bucket in ipairs(buckets) do
    larger = larger + known.payloads[bucket]
    if larger > SIZES_RARE * known.n then
      local bytes = size_bound(bucket)
      if known.into > 0 and known.out > 0 then bytes = size_bound(size_bucket(bytes * (1 + known.out / known.into))) end
      return math.min(max_trajectory_bytes, bytes)
    end
  end
  return max_trajectory_bytes
end

-- All unfilled slots at `each` bytes, those whose groups began with more at that.
local function reserved_bytes(known, each)
  local sum = 0
  for bytes, count in pairs(known.unfilled) do sum = sum + math.max(bytes, each) * count end
  return sum
end

-- A count goes up, or anew from there where somebody has driven it out of the range of numbers.
local function add(key, field, count)
  local sum = redis.pcall('HINCRBY', key, field, count)
  if type(sum) == 'number' then return sum end
  redis.call('HDEL', key, field)
  return redis.call('HINCRBY', key, field, count)
end

-- `count` slots of a group opened at `bytes` each are unfilled (or, below 0, no longer).
local function reserve(key, bytes, count)
  if add(key, 'u' .. bytes, count) <= 0 then redis.call('HDEL', key, 'u' .. bytes) end
end

-- Payloads of these sizes were pushed.
local function note_sizes(key, sizes)
  local counts = {}
  for _, bytes in ipairs(sizes) do
    local field = 'h' .. size_bucket(bytes)
    counts[field] = (counts[field] or 0) + 1
  end
  for field, count in pairs(counts) do add(key, field, count) end
  if add(key, 'n', #sizes) < SIZES_FORGET then return end
  local forgotten = 0
  for bucket, count in pairs(read_sizes(key).payloads) do
    local half = math.ceil(count / 2)
    forgotten = forgotten + half
    if add(key, 'h' .. bucket, -half) == 0 then redis.call('HDEL', key, 'h' .. bucket) end
  end
  add(key, 'n', -forgotten)
end
