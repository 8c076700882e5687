-- Tombstones of ended groups: group id -> letter and one digit per slot. The letter: 'c' = completed, 'e' = expired. A
-- digit: '0' = nobody has pushed it, '1' = it has ended, '2' = its packet is still on its way to the group. Two
-- generations: when the young one is full it replaces the old one, so at least the last dedupe_groups groups are remembered.
-- KEYS  ended, ended_before

-- Returns a group's tombstone and the hash that has it, or nil.
local function find_ended(id)
  local tombstone = redis.call('HGET', keys.ended, id)
  if tombstone then return tombstone, keys.ended end
  tombstone = redis.call('HGET', keys.ended_before, id)
  if tombstone then return tombstone, keys.ended_before end
  return nil
end

-- Why a member is dropped that comes after the end of its group.
local function after_end(tombstone)
  return string.sub(tombstone, 1, 1) == 'c' and 'surplus' or 'late'
end
