-- What a slot needs now, by the hash `sizes` (lib/sizes).
-- KEYS  sizes
local SIZES_KNOWN = 8  -- trajectories after which their sizes count; until then a slot needs max_trajectory_bytes
local SIZES_FORGET = 4096  -- at so many all counts are halved
local SIZES_RARE = 0.01  -- the share of trajectories that may be larger than what a slot needs

local function read_sizes(key)
  local flat, counts = redis.call('HGETALL', key), {payloads = {}, free = {}, known = 0, into = 0, out = 0}
  for i = 1, #flat, 2 do
    local kind, number = string.match(flat[i], '^([hu])(%d+)$')
    local count = tonumber(flat[i + 1]) or 0
    if kind and #number > 15 then kind = nil end
    if kind == 'h' then
      counts.payloads[tonumber(number)] = count
    elseif kind == 'u' then
      counts.free[tonumber(number)] = count
    elseif flat[i] == 'in' then
      counts.into = count
    elseif flat[i] == 'out' then
      counts.out = count
    end
  end
  for _, count in pairs(counts.payloads) do counts.known = counts.known + count end
  return counts
end

-- Bytes that a slot needs now: those of nearly all payloads, and as many for results as they have had so far.
local function slot_bytes(counts, max_trajectory_bytes)
  if counts.known < SIZES_KNOWN then return max_trajectory_bytes end
  local buckets, larger = {}, 0
  for bucket in pairs(counts.payloads) do buckets[#buckets + 1] = bucket end
  table.sort(buckets, function(a, b) return a > b end)
  for _, bucket in ipairs(buckets) do
    larger = larger + counts.payloads[bucket]
    if larger > SIZES_RARE * counts.known then
      local bytes = size_bound(bucket)
      if counts.into > 0 and counts.out > 0 then bytes = size_bound(size_bucket(bytes * (1 + counts.out / counts.into))) end
      return math.min(max_trajectory_bytes, bytes)
    end
  end
  return max_trajectory_bytes
end

-- Bytes reserved for all free slots: `bytes_now` each, or what a slot needed when its group was opened if that is more.
local function reserved_bytes(counts, bytes_now)
  local sum = 0
  for bytes, count in pairs(counts.free) do sum = sum + math.max(bytes, bytes_now) * count end
  for bytes, count in pairs(free) do sum = sum + math.max(bytes, bytes_now) * count end
  return sum
end

-- Once many are known all counts are halved, once for each read of them. Not before a script's first write: `add` would
-- take the refusal of a server above maxmemory for a count that is out of range.
local function forget_half(key, counts)
  for bucket, count in pairs(counts.known >= SIZES_FORGET and counts.payloads or {}) do
    if add(key, 'h' .. bucket, -math.ceil(count / 2)) == 0 then redis.call('HDEL', key, 'h' .. bucket) end
  end
  counts.known = 0
end
