-- What is reserved for the free slots of open groups: fields of the hash `sizes`, see lib/sizes.
-- KEYS  sizes
local free = {}  -- what this call changes: bytes a slot -> slots

-- `count` more slots of groups opened at `bytes` a slot are free; below 0: so many fewer.
local function reserve(bytes, count) free[bytes] = (free[bytes] or 0) + count end

-- Add to a count; it starts anew if somebody has driven it out of the range of numbers.
local function add(key, field, count)
  local sum = redis.pcall('HINCRBY', key, field, count)
  if type(sum) == 'number' then return sum end
  redis.call('HDEL', key, field)
  return redis.call('HINCRBY', key, field, count)
end

-- Write what this call has reserved.
local function write_reserved()
  for bytes, count in pairs(free) do
    local field = 'u' .. string.format('%d', bytes)
    if count ~= 0 and add(keys.sizes, field, count) <= 0 then redis.call('HDEL', keys.sizes, field) end
  end
end
