-- What trajectories of this run need, and what is reserved for the free slots of open groups.
-- KEYS  sizes, ledger
-- The hash `sizes` of a shard:
--   'h<b>'      trajectories pushed that have at most 2^(b/4) bytes, by the mean of their packet, and do not fit below;
--               older ones count less and less
--   'in', 'out' payload bytes that results were computed for, and bytes of these results
--   'u<bytes>'  free slots of open groups, by the bytes a slot needed when its group was opened
-- include count
local SIZES_MOST = 240  -- buckets above would be of payloads that no server holds

local function size_bound(bucket) return math.ceil(2 ^ (math.min(bucket, SIZES_MOST) / 4)) end

local function size_bucket(bytes)
  local bucket = math.max(0, math.ceil(4 * math.log(math.max(1, bytes)) / math.log(2)))
  while size_bound(bucket) < bytes and bucket < SIZES_MOST do bucket = bucket + 1 end
  return bucket
end

local free = {}  -- what this call changes: bytes a slot, as text -> slots

local pushed = {}  -- sizes that this call has to note: field -> count

-- `count` more slots of groups opened at `bytes` a slot are free; below 0: so many fewer.
local function reserve(bytes, count) free[bytes] = (free[bytes] or 0) + count end

-- A packet was pushed: its members count as of the same size.
local function note_size(bytes, members)
  local field = 'h' .. size_bucket(bytes / members)
  pushed[field] = (pushed[field] or 0) + members
end

-- Add to a count; it starts anew if somebody has driven it out of the range of numbers.
local function add(key, field, count)
  local sum = redis.pcall('HINCRBY', key, field, count)
  if type(sum) == 'number' then return sum end
  redis.call('HDEL', key, field)
  return redis.call('HINCRBY', key, field, count)
end

-- Write what this call has counted, reserved and noted.
local function write_figures()
  write_counts()
  for bytes, count in pairs(free) do
    local field = 'u' .. bytes
    if count ~= 0 and add(keys.sizes, field, count) <= 0 then redis.call('HDEL', keys.sizes, field) end
  end
  for field, count in pairs(pushed) do add(keys.sizes, field, count) end
end
