-- Tombstones of ended groups: id -> letter and bitmap. 'c' = completed, 'e' = expired; then one digit per slot:
-- '0' nobody has pushed it, '1' it has ended, '2' its record is still on its way to the group. Two generations: when
-- the young one is full it replaces the old one, so at least the last dedupe_groups groups are remembered.
local function find_ended(keys, id)
  local text = redis.call('HGET', keys.ended, id)
  if text then return text, keys.ended end
  text = redis.call('HGET', keys.ended_before, id)
  if text then return text, keys.ended_before end
  return nil
end

local function remember_ended(keys, id, letter, bitmap, dedupe_groups)
  if redis.call('HLEN', keys.ended) >= dedupe_groups then
    redis.call('UNLINK', keys.ended_before)  -- RENAME would free a million fields before it returns
    redis.call('RENAME', keys.ended, keys.ended_before)
  end
  redis.call('HSET', keys.ended, id, letter .. bitmap)
end
